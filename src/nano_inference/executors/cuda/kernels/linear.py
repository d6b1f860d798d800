"""The kernel of a matrix product with few rows: up to 16 tokens times a matrix of merged projections.

The inputs are split into ranges whose length depends on the matrix only; each program adds up one range for a tile of
outputs, and the last to finish a tile adds the ranges in ascending order. Rows are padded to 16, so a row's bits do not
depend on the number of rows.

Shapes: T tokens (padded to M), N outputs, K inputs, Z ranges, I tiles of outputs, BN outputs and BK inputs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel, dot


@triton.jit
def store_products(
    sum_MB: tl.tensor, bias_N: tl.tensor, out_TN: tl.tensor, out_B: tl.tensor, token_M: tl.tensor, valid_MB: tl.tensor,
    num_out: tl.tensor, out_stride: tl.tensor, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sums of a tile and the bias, rounded once."""
    if HAS_BIAS:
        sum_MB += tl.load(bias_N + out_B, mask=out_B < num_out, other=0.0).to(tl.float32)[None, :]
    tl.store(out_TN + token_M[:, None] * out_stride + out_B[None, :], sum_MB.to(out_TN.dtype.element_ty), mask=valid_MB)


@triton.jit
def multiply_range(
    x_TK: tl.tensor,
    weight_NK: tl.tensor,
    bias_N: tl.tensor,
    part_ZTN: tl.tensor,
    done_I: tl.tensor,
    out_TN: tl.tensor,
    num_tokens: tl.tensor,
    num_out: tl.tensor,
    num_in: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    range_size: tl.tensor,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Multiply one range of inputs for a tile of outputs. Grid: (I, Z).

    `IS_EVEN`: K is a multiple of BK, so that no load of inputs needs a mask and all are wide. `IS_SPLIT`: Z > 1; sums
    of ranges go through `part`, float32, and `done` counts the programs of each tile that have written theirs.
    """
    begin_kernel()
    token_M = tl.arange(0, M)
    tile, index, num_ranges = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    out_B = tile * BN + tl.arange(0, BN)
    first, end = index * range_size, tl.minimum((index + 1) * range_size, num_in)
    sum_MB = tl.zeros([M, BN], tl.float32)
    for start in range(first, end, BK):
        in_K = start + tl.arange(0, BK)
        x_place, weight_place = x_TK + in_K, weight_NK + in_K
        token_mask, out_mask = (token_M < num_tokens)[:, None], (out_B < num_out)[None, :]
        if not IS_EVEN:
            token_mask = token_mask & (in_K < end)[None, :]
            out_mask = out_mask & (in_K < end)[:, None]
        x_MK = tl.load(x_place[None, :] + token_M[:, None] * x_stride, mask=token_mask, other=0.0)
        weight_KB = tl.load(
            weight_place[:, None] + out_B.to(tl.int64)[None, :] * weight_stride, mask=out_mask, other=0.0
        )
        sum_MB += dot(x_MK, weight_KB, UPCAST)
    valid_MB = (token_M < num_tokens)[:, None] & (out_B < num_out)[None, :]
    if IS_SPLIT:
        size, at_MB = num_tokens * num_out, part_ZTN + token_M[:, None] * num_out + out_B[None, :]
        tl.store(at_MB + index * size, sum_MB, mask=valid_MB)
        tl.debug_barrier()  # the whole program has written before its one thread that counts
        if tl.atomic_add(done_I + tile, 1, sem="acq_rel") == num_ranges - 1:
            sum_MB = tl.zeros([M, BN], tl.float32)
            for _ in range(num_ranges):
                sum_MB += tl.load(at_MB, mask=valid_MB, other=0.0, cache_modifier=".cg")  # others wrote it: not in L1
                at_MB += size
            store_products(sum_MB, bias_N, out_TN, out_B, token_M, valid_MB, num_out, out_stride, HAS_BIAS)
            tl.store(done_I + tile, 0)
    else:
        store_products(sum_MB, bias_N, out_TN, out_B, token_M, valid_MB, num_out, out_stride, HAS_BIAS)
