"""The kernel of a matrix product, tokens times merged projections, whose sums have one order for any number of rows.

The inputs are divided into ranges whose length depends on the matrix only. Each is added up by itself, and then the
ranges in ascending order: by one program, or, with few programs, by the last of those that each compute one range. Rows
are padded to whole tiles, and a sum's order is the same in tiles of all sizes.

Shapes: T tokens, N outputs, K inputs, Z ranges, I tiles; a tile has M tokens, BN outputs and BK inputs at a time.
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
    """Write the sums of a part of a tile and the bias, rounded once."""
    if HAS_BIAS:
        sum_MB += tl.load(bias_N + out_B, mask=out_B < num_out, other=0.0).to(tl.float32)[None, :]
    tl.store(out_TN + token_M[:, None] * out_stride + out_B[None, :], sum_MB.to(out_TN.dtype.element_ty), mask=valid_MB)


@triton.jit
def zeros(M: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    """Return a matrix of zeros for each part of a tile."""
    found = ()
    for _ in tl.static_range(PARTS):
        found += (tl.zeros([M, BN], tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def added(a: tl.tuple, b: tl.tuple, PARTS: tl.constexpr) -> tl.tuple:
    """Return the sums of the parts of a and b."""
    found = ()
    for part in tl.static_range(PARTS):
        found += (a[part] + b[part],)  # type: ignore[assignment]
    return found


@triton.jit
def sum_of_ranges(
    at_MB: tl.tensor, size: tl.tensor, num_ranges: tl.tensor, valid_MB: tl.tensor, M: tl.constexpr, BN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the sums of all ranges, added in order. `at_MB` points to those of the first, `size` before the next."""
    sum_MB = tl.zeros([M, BN], tl.float32)
    for _ in range(num_ranges):
        # others wrote it: not in L1
        sum_MB += tl.load(at_MB, mask=valid_MB, other=0.0, cache_modifier=".cg")
        at_MB += size
    return sum_MB


@triton.jit(do_not_specialize=["num_tokens"])
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
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Multiply a tile of tokens and outputs. Grid: (tiles of tokens, tiles of outputs, Z or 1).

    `IS_EVEN`: K is a multiple of BK, so that no load of inputs needs a mask and all are wide. `IS_SPLIT`: each program
    has one range of several; sums of ranges go through `part`, float32, and `done` counts the programs of each tile
    that have written theirs. `IS_SUMMED`: each program has all ranges of several.
    """
    begin_kernel()
    index, num_ranges = tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(0) * (PARTS * M)
    x_TK += row.to(tl.int64) * x_stride
    out_TN += row.to(tl.int64) * out_stride
    token_M, out_B = tl.arange(0, M), tl.program_id(1) * BN + tl.arange(0, BN)
    first, end = 0, num_in
    if IS_SPLIT:
        first, end = index * range_size, tl.minimum((index + 1) * range_size, num_in)
    sums = zeros(M, BN, PARTS)
    totals = zeros(M, BN, PARTS)
    for start in range(first, end, BK):
        in_K = start + tl.arange(0, BK)
        x_place, weight_place = x_TK + in_K, weight_NK + in_K
        out_mask = (out_B < num_out)[None, :]
        if not IS_EVEN:
            out_mask = out_mask & (in_K < end)[:, None]
        weight_KB = tl.load(
            weight_place[:, None] + out_B.to(tl.int64)[None, :] * weight_stride, mask=out_mask, other=0.0
        )
        before, sums = sums, ()
        for part in tl.static_range(PARTS):
            place_M = part * M + token_M
            token_mask = (row + place_M < num_tokens)[:, None]
            if not IS_EVEN:
                token_mask = token_mask & (in_K < end)[None, :]
            x_MK = tl.load(x_place[None, :] + place_M[:, None] * x_stride, mask=token_mask, other=0.0)
            sums += (before[part] + dot(x_MK, weight_KB, UPCAST),)
        if IS_SUMMED:  # noqa: SIM102 - the first is decided when the kernel is compiled
            if (start + BK) % range_size == 0 or start + BK >= num_in:
                totals = added(totals, sums, PARTS)
                sums = zeros(M, BN, PARTS)
    if IS_SUMMED:
        sums = totals
    if IS_SPLIT:
        size, tile = num_tokens * num_out, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        part_ZTN += row * num_out
        for part in tl.static_range(PARTS):
            place_M = part * M + token_M
            valid_MB = (row + place_M < num_tokens)[:, None] & (out_B < num_out)[None, :]
            at_MB = part_ZTN + place_M[:, None] * num_out + out_B[None, :]
            tl.store(at_MB + index * size, sums[part], mask=valid_MB)
        tl.debug_barrier()  # the whole program has written before its one thread that counts
        if tl.atomic_add(done_I + tile, 1, sem="acq_rel") == num_ranges - 1:
            for part in tl.static_range(PARTS):
                place_M = part * M + token_M
                valid_MB = (row + place_M < num_tokens)[:, None] & (out_B < num_out)[None, :]
                at_MB = part_ZTN + place_M[:, None] * num_out + out_B[None, :]
                sum_MB = sum_of_ranges(at_MB, size, num_ranges, valid_MB, M, BN)
                store_products(sum_MB, bias_N, out_TN, out_B, place_M, valid_MB, num_out, out_stride, HAS_BIAS)
            tl.store(done_I + tile, 0)
    else:
        for part in tl.static_range(PARTS):
            place_M = part * M + token_M
            valid_MB = (row + place_M < num_tokens)[:, None] & (out_B < num_out)[None, :]
            store_products(sums[part], bias_N, out_TN, out_B, place_M, valid_MB, num_out, out_stride, HAS_BIAS)
