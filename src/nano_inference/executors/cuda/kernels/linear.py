"""Kernels of a matrix product with few rows: up to 16 tokens times a matrix of merged projections.

The inputs are split into ranges whose length depends on the matrix only; each program adds up one range for a tile of
outputs, and `merge_range` adds the ranges in ascending order. Rows are padded to 16, so a row's bits do not depend on
the number of rows.

Shapes: T tokens (padded to M), N outputs, K inputs, Z ranges, BN outputs and BK inputs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import dot


@triton.jit
def multiply_range(
    x_TK: tl.tensor,
    weight_NK: tl.tensor,
    part_ZTN: tl.tensor,
    num_tokens: tl.tensor,
    num_out: tl.tensor,
    num_in: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    range_size: tl.tensor,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Write the partial products of one range of inputs, float32. Grid: (N / BN, Z).

    `IS_EVEN`: K is a multiple of BK, so that no load of inputs needs a mask and all are wide.
    """
    token_M = tl.arange(0, M)
    out_B = tl.program_id(0) * BN + tl.arange(0, BN)
    first, end = tl.program_id(1) * range_size, tl.minimum((tl.program_id(1) + 1) * range_size, num_in)
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
    part_TN = part_ZTN + tl.program_id(1).to(tl.int64) * num_tokens * num_out
    tl.store(
        part_TN + token_M[:, None] * num_out + out_B[None, :],
        sum_MB,
        mask=(token_M < num_tokens)[:, None] & (out_B < num_out)[None, :],
    )


@triton.jit
def merge_range(
    part_ZTN: tl.tensor,
    bias_N: tl.tensor,
    out_TN: tl.tensor,
    num_ranges: tl.tensor,
    num_out: tl.tensor,
    out_stride: tl.tensor,
    C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Write the sum of the ranges, in ascending order, and the bias, rounded once. Grid: (T, N / C)."""
    token, out_C = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = out_C < num_out
    sum_C = tl.zeros([C], tl.float32)
    for index in range(num_ranges):
        at_C = part_ZTN + (index * tl.num_programs(0) + token).to(tl.int64) * num_out + out_C
        sum_C += tl.load(at_C, mask=valid_C, other=0.0)
    if HAS_BIAS:
        sum_C += tl.load(bias_N + out_C, mask=valid_C, other=0.0).to(tl.float32)
    tl.store(out_TN + token * out_stride + out_C, sum_C.to(out_TN.dtype.element_ty), mask=valid_C)
