"""Kernels of layers with recurrent states: the causal convolution, the gated delta rule, their norm and gates.

Each computes in float32 and rounds where the operation's docstring in `models.ops` says so. A program computes the
tokens of a row one after the other, and their sums have one order: a token has the same bits in any step.

Shapes: T tokens of the step, R rows, P parts of rows, Z slots, C channels, K taps, J = K - 1, H value heads, X key
size, V value size, W width of a buffer; M tokens and B columns of a tile, N a size, padded. A pointer has the suffix of
what is behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel, rounded, sigmoid


@triton.jit
def convolve_row(
    x_TC: tl.tensor,
    weight_CK: tl.tensor,
    out_TC: tl.tensor,
    state_ZJC: tl.tensor,
    part_R: tl.tensor,
    bound_P: tl.tensor,
    slot_P: tl.tensor,
    source_R: tl.tensor,
    position_T: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_channels: tl.tensor,
    K: tl.constexpr,
    M: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Convolve some channels of a row, M tokens at a time, then write the states. Grid: (blocks of channels, R)."""
    begin_kernel()
    channel_B, row = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1)
    valid_B = channel_B < num_channels
    first, last = tl.load(part_R + row), tl.load(part_R + row + 1)
    begin, end = tl.load(bound_P + first), tl.load(bound_P + last)
    position, source = tl.load(position_T + begin), tl.load(source_R + row)
    oldest = tl.where(position > 0, K - 1, 0)  # how many tokens before the row's first the state has
    past_JC = state_ZJC + source.to(tl.int64) * slot_stride
    if position >= 0:
        for start in range(begin, end, M):
            token_M = start + tl.arange(0, M)
            valid_MB = (token_M < end)[:, None] & valid_B[None, :]
            sum_MB = tl.zeros([M, B], tl.float32)
            for tap in tl.static_range(K):
                at_M = token_M - (K - 1 - tap)
                is_past_M = (at_M < begin) & (at_M >= begin - oldest)
                x_MB = tl.load(
                    x_TC + at_M.to(tl.int64)[:, None] * x_stride + channel_B[None, :],
                    mask=(at_M >= begin)[:, None] & valid_MB,
                    other=0.0,
                )
                past_MB = tl.load(
                    past_JC + (at_M - begin + K - 1)[:, None] * num_channels + channel_B[None, :],
                    mask=is_past_M[:, None] & valid_MB,
                    other=0.0,
                )
                weight_B = tl.load(weight_CK + channel_B * K + tap, mask=valid_B, other=0.0).to(tl.float32)
                sum_MB += weight_B[None, :] * (x_MB.to(tl.float32) + past_MB)
            sum_MB = rounded(sum_MB, out_TC)
            tl.store(
                out_TC + token_M.to(tl.int64)[:, None] * out_stride + channel_B[None, :],
                (sum_MB * sigmoid(sum_MB)).to(out_TC.dtype.element_ty),
                mask=valid_MB,
            )
        tl.debug_barrier()  # the whole program has read the state before it
        for is_source in range(2):  # the slot that it was read from is written last
            for part in range(first, last):
                slot, count = tl.load(slot_P + part), tl.load(bound_P + part + 1) - begin
                if (slot >= 0) & ((slot == source) == (is_source == 1)):
                    to_JC = state_ZJC + slot.to(tl.int64) * slot_stride + channel_B
                    for place in range(K - 1):
                        own = count - (K - 1) + place  # the token of the row; below 0: before it
                        num_own = tl.where(own >= 0, num_channels, 0)
                        num_past = tl.where((own < 0) & (own >= -oldest), num_channels, 0)
                        x_place = x_TC + (begin + own).to(tl.int64) * x_stride + channel_B
                        x_B = tl.load(x_place, mask=channel_B < num_own, other=0.0).to(tl.float32)
                        past_place = past_JC + (count + place) * num_channels + channel_B
                        x_B += tl.load(past_place, mask=channel_B < num_past, other=0.0)
                        tl.store(to_JC + place * num_channels, x_B, mask=valid_B)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + e^x), float32; the quotient corrects the rounding of 1 + e^x."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    log = tl.where(total == 1.0, power, tl.log(total) * power / tl.where(total == 1.0, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, log)


@triton.jit
def unit(x_N: tl.tensor) -> tl.tensor:
    """Return x / sqrt(sum x² + 1e-6)."""
    return x_N * tl.rsqrt(tl.sum(x_N * x_N, 0) + 1e-6)


@triton.jit
def advance_state(
    qkv_TW: tl.tensor,
    a_TH: tl.tensor,
    b_TH: tl.tensor,
    a_log_H: tl.tensor,
    dt_bias_H: tl.tensor,
    out_TW: tl.tensor,
    state_ZHXV: tl.tensor,
    part_R: tl.tensor,
    bound_P: tl.tensor,
    slot_P: tl.tensor,
    source_R: tl.tensor,
    position_T: tl.tensor,
    qkv_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_keys: tl.tensor,
    v_size: tl.tensor,
    scale: tl.tensor,
    X: tl.constexpr,
    N: tl.constexpr,
    B: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> None:
    """Apply the gated delta rule to some columns of a head's state. Grid: (blocks of columns, H, R)."""
    begin_kernel()
    column_B, head, row = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1), tl.program_id(2)
    key_N = tl.arange(0, N)
    valid_N, valid_B = key_N < X, column_B < v_size
    key_head = head % num_keys if IS_TILED else head // (tl.num_programs(1) // num_keys)
    first, last = tl.load(part_R + row), tl.load(part_R + row + 1)
    begin, end = tl.load(bound_P + first), tl.load(bound_P + last)
    position = tl.load(position_T + begin)
    if position >= 0:
        state_ZHXV += head * X * v_size
        at_NB = key_N[:, None] * v_size + column_B[None, :]
        num_read = tl.where(position > 0, v_size, 0)
        source = tl.load(source_R + row).to(tl.int64)
        S_NB = tl.load(
            state_ZHXV + source * slot_stride + at_NB,
            mask=valid_N[:, None] & (column_B < num_read)[None, :],
            other=0.0,
        )
        rate, dt_bias = tl.exp(tl.load(a_log_H + head)), tl.load(dt_bias_H + head)
        q_place = qkv_TW + key_head * X + key_N
        v_place = qkv_TW + 2 * num_keys * X + head * v_size + column_B
        # each token is loaded while the one before it is computed
        at, last_token = begin.to(tl.int64), end.to(tl.int64) - 1
        q_N = tl.load(q_place + at * qkv_stride, mask=valid_N, other=0.0)
        k_N = tl.load(q_place + num_keys * X + at * qkv_stride, mask=valid_N, other=0.0)
        v_B = tl.load(v_place + at * qkv_stride, mask=valid_B, other=0.0)
        a, b = tl.load(a_TH + at * a_stride + head), tl.load(b_TH + at * b_stride + head)
        for part in range(first, last):
            for _ in range(tl.load(bound_P + part), tl.load(bound_P + part + 1)):
                next_at = tl.minimum(at + 1, last_token)
                next_q_N = tl.load(q_place + next_at * qkv_stride, mask=valid_N, other=0.0)
                next_k_N = tl.load(q_place + num_keys * X + next_at * qkv_stride, mask=valid_N, other=0.0)
                next_v_B = tl.load(v_place + next_at * qkv_stride, mask=valid_B, other=0.0)
                next_a, next_b = tl.load(a_TH + next_at * a_stride + head), tl.load(b_TH + next_at * b_stride + head)
                unit_q_N, unit_k_N = unit(q_N.to(tl.float32)) * scale, unit(k_N.to(tl.float32))
                S_NB *= tl.exp(-rate * softplus(a.to(tl.float32) + dt_bias))
                beta = rounded(sigmoid(b.to(tl.float32)), b_TH)
                d_B = (v_B.to(tl.float32) - tl.sum(S_NB * unit_k_N[:, None], 0)) * beta
                S_NB += unit_k_N[:, None] * d_B[None, :]
                out_B = tl.sum(S_NB * unit_q_N[:, None], 0)
                place = out_TW + at * out_stride + head * v_size + column_B
                tl.store(place, out_B.to(out_TW.dtype.element_ty), mask=valid_B)
                at, q_N, k_N, v_B, a, b = next_at, next_q_N, next_k_N, next_v_B, next_a, next_b
            slot = tl.load(slot_P + part)
            num_written = tl.where(slot >= 0, v_size, 0)
            tl.store(
                state_ZHXV + slot.to(tl.int64) * slot_stride + at_NB,
                S_NB,
                mask=valid_N[:, None] & (column_B < num_written)[None, :],
            )


@triton.jit
def gated_norm_heads(
    x_TW: tl.tensor,
    gate_TW: tl.tensor,
    weight_V: tl.tensor,
    out_TW: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    out_stride: tl.tensor,
    num_heads: tl.tensor,
    v_size: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Write weight · norm(x) · silu(gate) of H heads of a token. Grid: (T, blocks of heads)."""
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    head_H, column_N = tl.program_id(1) * H + tl.arange(0, H), tl.arange(0, N)
    valid_N = column_N < v_size
    valid_HN = (head_H < num_heads)[:, None] & valid_N[None, :]
    at_HN = head_H[:, None] * v_size + column_N[None, :]
    x_HN = tl.load(x_TW + row * x_stride + at_HN, mask=valid_HN, other=0.0).to(tl.float32)
    gate_HN = tl.load(gate_TW + row * gate_stride + at_HN, mask=valid_HN, other=0.0).to(tl.float32)
    weight_N = tl.load(weight_V + column_N, mask=valid_N, other=0.0).to(tl.float32)
    x_HN = x_HN * tl.rsqrt(tl.sum(x_HN * x_HN, 1) / v_size + eps)[:, None]
    x_HN = rounded(rounded(x_HN, out_TW) * weight_N[None, :], out_TW)
    out_HN = x_HN * (gate_HN * sigmoid(gate_HN))
    tl.store(out_TW + row * out_stride + at_HN, out_HN.to(out_TW.dtype.element_ty), mask=valid_HN)


@triton.jit
def gate_block(
    x_TW: tl.tensor,
    gate_TW: tl.tensor,
    out_TW: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Write x · sigmoid(gate). Grid: (T, blocks of columns)."""
    begin_kernel()
    row, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    x_C = tl.load(x_TW + row * x_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    gate_C = tl.load(gate_TW + row * gate_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    out_C = x_C * rounded(sigmoid(gate_C), out_TW)
    tl.store(out_TW + row * out_stride + column_C, out_C.to(out_TW.dtype.element_ty), mask=valid_C)


@triton.jit
def arrange_block(
    x_TW: tl.tensor,
    column_W: tl.tensor,
    out_TW: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Write the columns of x in another order. Grid: (T, blocks of columns)."""
    begin_kernel()
    row, place_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = place_C < width
    column_C = tl.load(column_W + place_C, mask=valid_C, other=0)
    x_C = tl.load(x_TW + row * x_stride + column_C, mask=valid_C, other=0.0)
    tl.store(out_TW + row * out_stride + place_C, x_C, mask=valid_C)
