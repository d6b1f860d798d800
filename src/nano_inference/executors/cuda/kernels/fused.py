"""Kernels for few tokens that compute several operations, to save launches: a norm, a product and an activation; head
norms, rotation, cache write and attention.

Each has the bits of the kernels that it replaces: both call the same functions on blocks of the same shapes, with as
many warps, so that sums have one order (`make aot` compares it in compiled code).

Shapes: T tokens, N outputs, K inputs, Z ranges, I tiles; a tile has M tokens, BN outputs and BK inputs at a time, and C
columns of a norm. Of attention those of `attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.attention import attend_keys, merged, store_partial
from nano_inference.executors.cuda.kernels.language import begin_kernel, dot, rounded
from nano_inference.executors.cuda.kernels.linear import store_products, sum_of_ranges
from nano_inference.executors.cuda.kernels.pointwise import (
    RELU_SQUARED,
    activated,
    heads_of,
    inverse_rms,
    normalised,
    store_heads,
    summed,
)

NO_ACTIVATION = tl.constexpr(3)


@triton.jit
def store_activated(
    sum_MB: tl.tensor, bias_N: tl.tensor, out_TN: tl.tensor, out_B: tl.tensor, token_M: tl.tensor, valid_MB: tl.tensor,
    tile: tl.tensor, num_tokens: tl.tensor, num_out: tl.tensor, out_stride: tl.tensor,
    M: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sums of a tile and the bias, or their activation; columns of gate and up alternate."""
    if KIND == NO_ACTIVATION:
        store_products(sum_MB, bias_N, out_TN, out_B, token_M, valid_MB, num_out, out_stride, HAS_BIAS)
    elif KIND == RELU_SQUARED:
        x_MB = rounded(sum_MB, out_TN)
        x_MB = activated(x_MB, x_MB, out_TN, KIND)
        store_products(x_MB, bias_N, out_TN, out_B, token_M, valid_MB, num_out, out_stride, HAS_BIAS)
    else:
        gate_MC, up_MC = tl.split(tl.reshape(rounded(sum_MB, out_TN), [M, BN // 2, 2]))
        x_MC = activated(gate_MC, up_MC, out_TN, KIND)
        out_C = tile * (BN // 2) + tl.arange(0, BN // 2)
        valid_MC = (token_M < num_tokens)[:, None] & (out_C < num_out // 2)[None, :]
        store_products(x_MC, bias_N, out_TN, out_C, token_M, valid_MC, num_out, out_stride, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_norm(
    x_TK: tl.tensor,
    more_TK: tl.tensor,
    sum_TK: tl.tensor,
    norm_K: tl.tensor,
    weight_NK: tl.tensor,
    bias_N: tl.tensor,
    part_ZTN: tl.tensor,
    done_I: tl.tensor,
    out_TN: tl.tensor,
    num_tokens: tl.tensor,
    num_out: tl.tensor,
    num_in: tl.tensor,
    x_stride: tl.tensor,
    more_stride: tl.tensor,
    sum_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    range_size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Write sum = x + more, and norm(sum) Wᵀ + bias or act(norm(sum) Wᵀ). Grid: (tiles of outputs, Z or 1).

    Every program computes the norms of all tokens; those of the first tile write the sum. `KIND`: `ACTIVATIONS` or
    `NO_ACTIVATION`; W has the rows of the gate, then those of up. Others: `multiply_range`.
    """
    begin_kernel()
    tile, index = tl.program_id(0), tl.program_id(1)
    token_M, place_B = tl.arange(0, M), tile * BN + tl.arange(0, BN)
    valid_M1, is_out_B = (token_M < num_tokens)[:, None], place_B < num_out
    written_M1 = (token_M < tl.where(tile == 0, num_tokens, 0))[:, None]
    out_B = place_B
    if KIND < RELU_SQUARED:
        out_B = place_B // 2 + place_B % 2 * (num_out // 2)
    first, end = 0, num_in
    if IS_SPLIT:
        first, end = index * range_size, tl.minimum((index + 1) * range_size, num_in)
    inverse_M = tl.zeros([M], tl.float32)
    for token in range(num_tokens):
        inverse = inverse_rms(
            x_TK + token * x_stride, more_TK + token * more_stride, sum_TK, num_in, eps, C, HAS_MORE=True
        )
        inverse_M = tl.where(token_M == token, inverse, inverse_M)
    sum_MB = tl.zeros([M, BN], tl.float32)
    for start in range(first, end, BK):
        in_K = start + tl.arange(0, BK)
        valid_MK, valid_KB = valid_M1, is_out_B[None, :]
        if not IS_EVEN:
            valid_MK, valid_KB = valid_MK & (in_K < end)[None, :], valid_KB & (in_K < end)[:, None]
        weight_KB = tl.load(
            (weight_NK + in_K)[:, None] + out_B.to(tl.int64)[None, :] * weight_stride, mask=valid_KB, other=0.0
        )
        x_MK = summed(
            x_TK + token_M[:, None] * x_stride + in_K[None, :],
            more_TK + token_M[:, None] * more_stride + in_K[None, :],
            valid_MK,
            sum_TK,
            HAS_MORE=True,
        )
        tl.store(
            sum_TK + token_M[:, None] * sum_stride + in_K[None, :],
            x_MK.to(sum_TK.dtype.element_ty),
            mask=valid_MK & written_M1,
        )
        # a weight for each token, because only wide loads are started early
        norm_MK = tl.broadcast_to((norm_K + in_K)[None, :], [M, BK])
        x_MK = normalised(x_MK, inverse_M[:, None], norm_MK, valid_MK, offset, x_TK, True, HAS_OFFSET)
        sum_MB += dot(x_MK, weight_KB, UPCAST)
    valid_MB = valid_M1 & is_out_B[None, :]
    if IS_SPLIT:
        size, num_ranges = num_tokens * num_out, tl.num_programs(1)
        at_MB = part_ZTN + token_M[:, None] * num_out + out_B[None, :]
        tl.store(at_MB + index * size, sum_MB, mask=valid_MB)
        tl.debug_barrier()  # the whole program has written before its one thread that counts
        if tl.atomic_add(done_I + tile, 1, sem="acq_rel") == num_ranges - 1:
            sum_MB = sum_of_ranges(at_MB, size, num_ranges, valid_MB, M, BN)
            store_activated(
                sum_MB, bias_N, out_TN, out_B, token_M, valid_MB, tile, num_tokens, num_out, out_stride, M, BN,
                HAS_BIAS, KIND,
            )  # fmt: skip
            tl.store(done_I + tile, 0)
    else:
        store_activated(
            sum_MB, bias_N, out_TN, out_B, token_M, valid_MB, tile, num_tokens, num_out, out_stride, M, BN, HAS_BIAS,
            KIND,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "num_splits"])
def attend_row(
    qkv_TW: tl.tensor,
    q_norm_D: tl.tensor,
    k_norm_D: tl.tensor,
    cos_LF: tl.tensor,
    sin_LF: tl.tensor,
    position_T: tl.tensor,
    table_RB: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    done_I: tl.tensor,
    out_THD: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    ratio: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    num_splits: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    rotary_dim: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Attend for the queries of one kv head over one split of a token's keys. Grid: (T, kv heads, splits).

    Each program normalises and rotates its queries, that of the last split also the key, which it writes to the cache
    with the value; the one that finishes last adds the splits. `done` counts those that have.
    """
    begin_kernel()
    token, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_T + token)
    low = tl.maximum(split * SPLIT, position + 1 - window)
    high = tl.minimum(split * SPLIT + SPLIT, position + 1)
    if low < high:
        # rows of the tile: queries, their key, their value
        place_M, dim_P = tl.arange(0, M), tl.arange(0, P)
        num_q, is_q_M = ratio * num_kv, place_M < ratio
        kv_head_M = kv_head + (place_M - ratio) * num_kv
        head_M = tl.where(is_q_M, kv_head * ratio + place_M, num_q + kv_head_M)
        given_MP, turned_MP = heads_of(
            qkv_TW + token * stride, head_M, q_norm_D, k_norm_D, cos_LF, sin_LF, position, num_q, num_kv, eps, offset,
            rotary_dim, D, P, True, NORM, HAS_WEIGHT, HAS_OFFSET,
        )  # fmt: skip
        table_B = table_RB + token * table_stride
        if high == position + 1:
            kv_head_M = tl.where(is_q_M, -1, kv_head_M)
            store_heads(k_SJD, v_SJD, table_B, position, block_size, kv_head_M, num_kv, given_MP, turned_MP, D, P)
            tl.debug_barrier()  # the whole program has written what all its threads read
        q_MP = tl.where(is_q_M[:, None], turned_MP, 0.0)
        high_M = tl.where(is_q_M, position + 1, 0)
        best_M, mass_M, out_MP = attend_keys(
            q_MP, k_SJD, v_SJD, table_B, high_M - window, high_M, low, high, kv_head, num_kv, block_size, scale, 1.0,
            D, P, M, C, False, UPCAST,
        )  # fmt: skip
        head_M += token * num_q
        store_partial(part_THND, score_THN, best_M, mass_M, out_MP, head_M * num_splits + split, is_q_M, D, P)
        tl.debug_barrier()  # as in `multiply_norm`
        first, end = tl.maximum(0, position + 1 - window) // SPLIT, position // SPLIT + 1
        done = done_I + token * num_kv + kv_head
        if tl.atomic_add(done, 1, sem="acq_rel") == end - first - 1:
            merged_MP = merged(part_THND, score_THN, head_M, is_q_M, first, end, num_splits, D, P, M)
            at_MP = head_M[:, None] * D + dim_P[None, :]
            valid_MP = is_q_M[:, None] & (dim_P < D)[None, :]
            tl.store(out_THD + at_MP, merged_MP.to(out_THD.dtype.element_ty), mask=valid_MP)
            tl.store(done, 0)
