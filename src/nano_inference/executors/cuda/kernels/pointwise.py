"""Kernels of the operations of `models.ops` that read a row at a time: norms, rotation with the cache write, gates.

Each computes in float32 and rounds where the operation's docstring says so; `executors.torch.ops` is the reference.

Shapes: T tokens of the step, W width of a buffer, R rows of the step, B blocks per row, S slots of the cache, H heads,
J kv heads, D head size, L positions, F rotary size / 2, V rows of a table, C columns of a block, P padded head
size. A pointer has the suffix of what is behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel, capped, rounded, sigmoid, tanh

SILU, GELU_TANH, RELU_SQUARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PREVIOUS, PAIR = tl.constexpr(1), tl.constexpr(2)
NO_NORM, NORM_FIRST, NORM_LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def weighted(
    x_P: tl.tensor, weight_P: tl.tensor, offset: tl.tensor, out: tl.tensor, HAS_OFFSET: tl.constexpr
) -> tl.tensor:
    """Return x · (offset + weight); without an offset, x is rounded to the precision of `out` first."""
    return x_P * (offset + weight_P) if HAS_OFFSET else rounded(x_P, out) * weight_P


@triton.jit
def summed(
    x_at: tl.tensor, more_at: tl.tensor, mask: tl.tensor, out: tl.tensor, HAS_MORE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return elements of x, float32, or of x + more rounded to the precision of `out`. Arguments are their places."""
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_MORE:
        x = rounded(x + tl.load(more_at, mask=mask, other=0.0).to(tl.float32), out)
    return x


@triton.jit
def inverse_rms(
    x_W: tl.tensor, more_W: tl.tensor, out: tl.tensor, width: tl.tensor, eps: tl.tensor,
    C: tl.constexpr, HAS_MORE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return 1 / sqrt(mean square + eps) of a row (`summed`). C and the number of warps determine the sum's order."""
    square_C = tl.zeros([C], tl.float32)
    for start in range(0, width, C):
        column_C = start + tl.arange(0, C)
        x_C = summed(x_W + column_C, more_W + column_C, column_C < width, out, HAS_MORE)
        square_C += x_C * x_C
    return tl.rsqrt(tl.sum(square_C, 0) / width + eps)


@triton.jit
def normalised(
    x: tl.tensor, inverse: tl.tensor, weight_at: tl.tensor, mask: tl.tensor, offset: tl.tensor, out: tl.tensor,
    HAS_WEIGHT: tl.constexpr, HAS_OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return elements of a row times `inverse_rms`, weighted, in the precision of `out`."""
    x = x * inverse
    if HAS_WEIGHT:
        weight = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
        x = weighted(x, weight, offset, out, HAS_OFFSET)
    return x.to(out.dtype.element_ty)


@triton.jit
def norm_row(
    x_TW: tl.tensor,
    more_TW: tl.tensor,
    sum_TW: tl.tensor,
    weight_W: tl.tensor,
    out_TW: tl.tensor,
    x_stride: tl.tensor,
    more_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    C: tl.constexpr,
    HAS_MORE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> None:
    """Write sum = x + more, and norm(sum); or norm(x). Grid: (T,)."""
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    x_TW, more_TW = x_TW + row * x_stride, more_TW + row * more_stride
    sum_TW, out_TW = sum_TW + row * out_stride, out_TW + row * out_stride
    inverse = inverse_rms(x_TW, more_TW, sum_TW, width, eps, C, HAS_MORE)
    for start in range(0, width, C):
        column_C = start + tl.arange(0, C)
        valid_C = column_C < width
        x_C = summed(x_TW + column_C, more_TW + column_C, valid_C, sum_TW, HAS_MORE)
        if HAS_MORE:
            tl.store(sum_TW + column_C, x_C.to(sum_TW.dtype.element_ty), mask=valid_C)
        out_C = normalised(x_C, inverse, weight_W + column_C, valid_C, offset, out_TW, HAS_WEIGHT, HAS_OFFSET)
        tl.store(out_TW + column_C, out_C, mask=valid_C)


@triton.jit
def head_norm(
    x_HP: tl.tensor,
    inverse_H: tl.tensor,
    norm_HD: tl.tensor,
    at_P: tl.tensor,
    offset: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> tl.tensor:
    """Return elements of heads times the inverse of each head's root mean square, weighted and rounded.

    `norm_HD` points to the weights of each head.
    """
    x_HP = x_HP * inverse_H[:, None]
    if HAS_WEIGHT:
        weight_HP = tl.load(norm_HD[:, None] + at_P[None, :], mask=(at_P < D)[None, :], other=0.0).to(tl.float32)
        x_HP = weighted(x_HP, weight_HP, offset, out, HAS_OFFSET)
    return rounded(x_HP, out)


@triton.jit
def turned_heads(
    x_HP: tl.tensor,
    head_HD: tl.tensor,
    valid_H: tl.tensor,
    norm_HD: tl.tensor,
    cos_LF: tl.tensor,
    sin_LF: tl.tensor,
    position: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    rotary_dim: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> tl.tensor:
    """Return heads after their norm, before or after the rotation of their first `rotary_dim` dimensions.

    `head_HD` points to the heads whose elements are `x_HP`.
    """
    dim_P = tl.arange(0, P)
    inverse_H = tl.rsqrt(tl.sum(x_HP * x_HP, 1) / D + eps)
    if NORM == NORM_FIRST:
        x_HP = head_norm(x_HP, inverse_H, norm_HD, dim_P, offset, out, D, HAS_WEIGHT, HAS_OFFSET)
    if HAS_ROTARY:
        half = rotary_dim // 2
        is_low_P, turns_P = dim_P < half, dim_P < rotary_dim
        partner_P = tl.where(is_low_P, dim_P + half, dim_P - half)
        mask_HP = valid_H[:, None] & turns_P[None, :]
        other_HP = tl.load(head_HD[:, None] + partner_P[None, :], mask=mask_HP, other=0.0).to(tl.float32)
        if NORM == NORM_FIRST:
            other_HP = head_norm(other_HP, inverse_H, norm_HD, partner_P, offset, out, D, HAS_WEIGHT, HAS_OFFSET)
        at_P = position.to(tl.int64) * half + tl.where(is_low_P, dim_P, partner_P)
        cos_P = tl.load(cos_LF + at_P, mask=turns_P, other=1.0).to(tl.float32)
        sin_P = tl.load(sin_LF + at_P, mask=turns_P, other=0.0).to(tl.float32)
        sin_P = tl.where(is_low_P, -sin_P, sin_P)
        turned_HP = rounded(x_HP * cos_P[None, :], out) + other_HP * sin_P[None, :]
        x_HP = tl.where(turns_P[None, :], rounded(turned_HP, out), x_HP)
    if NORM == NORM_LAST:
        inverse_H = tl.rsqrt(tl.sum(x_HP * x_HP, 1) / D + eps)
        x_HP = head_norm(x_HP, inverse_H, norm_HD, dim_P, offset, out, D, HAS_WEIGHT, HAS_OFFSET)
    return x_HP


@triton.jit
def heads_of(
    qkv_W: tl.tensor,
    head_H: tl.tensor,
    q_norm_D: tl.tensor,
    k_norm_D: tl.tensor,
    cos_LF: tl.tensor,
    sin_LF: tl.tensor,
    position: tl.tensor,
    num_q: tl.tensor,
    num_kv: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    rotary_dim: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> tl.tensor:
    """Return some heads of a token's queries, keys and values: as they are, and after `turned_heads`."""
    dim_P, valid_H = tl.arange(0, P), head_H < num_q + 2 * num_kv
    head_HD = qkv_W + head_H * D
    given_HP = tl.load(head_HD[:, None] + dim_P[None, :], mask=valid_H[:, None] & (dim_P < D)[None, :], other=0.0)
    norm_HD = tl.where(head_H < num_q, q_norm_D, k_norm_D)
    turned_HP = turned_heads(
        given_HP.to(tl.float32), head_HD, valid_H, norm_HD, cos_LF, sin_LF, position, eps, offset, rotary_dim,
        qkv_W, D, P, HAS_ROTARY, NORM, HAS_WEIGHT, HAS_OFFSET,
    ).to(qkv_W.dtype.element_ty)  # fmt: skip
    return given_HP, turned_HP


@triton.jit
def store_heads(
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    table_B: tl.tensor,
    position: tl.tensor,
    block_size: tl.tensor,
    kv_head_H: tl.tensor,
    num_kv: tl.tensor,
    given_HP: tl.tensor,
    turned_HP: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Write the keys and values among heads to a token's slot. `kv_head_H` counts from its first key."""
    dim_P = tl.arange(0, P)
    slot = tl.load(table_B + position // block_size).to(tl.int64) * block_size + position % block_size
    at_HP, inside_P = (slot * num_kv + kv_head_H)[:, None] * D + dim_P[None, :], dim_P < D
    is_key_H = (kv_head_H >= 0) & (kv_head_H < num_kv)
    is_value_H = (kv_head_H >= num_kv) & (kv_head_H < 2 * num_kv)
    tl.store(k_SJD + at_HP, turned_HP, mask=is_key_H[:, None] & inside_P[None, :])
    tl.store(v_SJD + at_HP - num_kv * D, given_HP, mask=is_value_H[:, None] & inside_P[None, :])


@triton.jit
def rotate_heads(
    qkv_TW: tl.tensor,
    q_norm_D: tl.tensor,
    k_norm_D: tl.tensor,
    cos_LF: tl.tensor,
    sin_LF: tl.tensor,
    position_T: tl.tensor,
    row_T: tl.tensor,
    table_RB: tl.tensor,
    q_THD: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    num_q: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    rotary_dim: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> None:
    """Write H heads of a token: queries, and keys and values to the cache. Grid: (T, (q heads + 2 · kv heads) / H)."""
    begin_kernel()
    token, head_H = tl.program_id(0).to(tl.int64), tl.program_id(1) * H + tl.arange(0, H)
    position = tl.load(position_T + token)
    if position >= 0:
        given_HP, turned_HP = heads_of(
            qkv_TW + token * stride, head_H, q_norm_D, k_norm_D, cos_LF, sin_LF, position, num_q, num_kv, eps, offset,
            rotary_dim, D, P, HAS_ROTARY, NORM, HAS_WEIGHT, HAS_OFFSET,
        )  # fmt: skip
        dim_P = tl.arange(0, P)
        at_HP = (token * num_q + head_H)[:, None] * D + dim_P[None, :]
        tl.store(q_THD + at_HP, turned_HP, mask=(head_H < num_q)[:, None] & (dim_P < D)[None, :])
        if tl.program_id(1) * H + H > num_q:
            table_B = table_RB + tl.load(row_T + token).to(tl.int64) * table_stride
            kv_head_H = head_H - num_q
            store_heads(k_SJD, v_SJD, table_B, position, block_size, kv_head_H, num_kv, given_HP, turned_HP, D, P)


@triton.jit
def activated(gate: tl.tensor, up: tl.tensor, out: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return act(gate) · up, or relu(gate)², float32."""
    if KIND == RELU_SQUARED:
        return tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    if KIND == SILU:
        gate = gate * sigmoid(gate)
    else:
        gate = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return rounded(gate, out) * up


@triton.jit
def activate_block(
    gate_TW: tl.tensor,
    up_TW: tl.tensor,
    out_TW: tl.tensor,
    x_stride: tl.tensor,
    up_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    C: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Write act(gate) · up, or relu(gate)². Grid: (T, W / C)."""
    begin_kernel()
    row, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    gate_C = tl.load(gate_TW + row * x_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    up_C = gate_C
    if KIND != RELU_SQUARED:
        up_C = tl.load(up_TW + row * up_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    x_C = activated(gate_C, up_C, out_TW, KIND)
    tl.store(out_TW + row * out_stride + column_C, x_C.to(out_TW.dtype.element_ty), mask=valid_C)


@triton.jit
def mix_block(
    x_TW: tl.tensor,
    y_TW: tl.tensor,
    out_TW: tl.tensor,
    a_1: tl.tensor,
    b_1: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    sign: tl.tensor,
    C: tl.constexpr,
    HAS_A: tl.constexpr,
) -> None:
    """Write a · x + sign · b · y, or x + sign · b · y; each product is rounded. Grid: (T, W / C)."""
    begin_kernel()
    row, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    x_C = tl.load(x_TW + row * x_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    y_C = tl.load(y_TW + row * y_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    if HAS_A:
        x_C = rounded(tl.load(a_1) * x_C, out_TW)
    out_C = x_C + sign * rounded(tl.load(b_1) * y_C, out_TW)
    tl.store(out_TW + row * out_stride + column_C, out_C.to(out_TW.dtype.element_ty), mask=valid_C)


@triton.jit
def gate_values_block(
    v_TW: tl.tensor,
    gate_TJ: tl.tensor,
    more_TW: tl.tensor,
    v_stride: tl.tensor,
    gate_stride: tl.tensor,
    more_stride: tl.tensor,
    width: tl.tensor,
    head_dim: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Add scale · sigmoid(gate of the kv head) · more to v, in place. Grid: (T, W / C)."""
    begin_kernel()
    row, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    v_C = tl.load(v_TW + row * v_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    gate_C = tl.load(gate_TJ + row * gate_stride + column_C // head_dim, mask=valid_C, other=0.0).to(tl.float32)
    more_C = tl.load(more_TW + row * more_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    v_C += scale * sigmoid(gate_C) * more_C
    tl.store(v_TW + row * v_stride + column_C, v_C.to(v_TW.dtype.element_ty), mask=valid_C)


@triton.jit
def smear_block(
    x_TW: tl.tensor,
    gate_T1: tl.tensor,
    before_TW: tl.tensor,
    share_1: tl.tensor,
    previous_T: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    before_stride: tl.tensor,
    width: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Add share · sigmoid(gate) · before to x, in place, for tokens with a previous token. Grid: (T, W / C)."""
    begin_kernel()
    row, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    if tl.load(previous_T + row) >= 0:
        factor = tl.load(share_1) * sigmoid(tl.load(gate_T1 + row * gate_stride).to(tl.float32))
        x_C = tl.load(x_TW + row * x_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
        x_C += factor * tl.load(before_TW + row * before_stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
        tl.store(x_TW + row * x_stride + column_C, x_C.to(x_TW.dtype.element_ty), mask=valid_C)


@triton.jit
def softcap_block(x_TW: tl.tensor, stride: tl.tensor, width: tl.tensor, cap: tl.tensor, C: tl.constexpr) -> None:
    """Replace x by cap · tanh(x / cap). Grid: (T, W / C)."""
    begin_kernel()
    row, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    x_C = tl.load(x_TW + row * stride + column_C, mask=valid_C, other=0.0).to(tl.float32)
    tl.store(x_TW + row * stride + column_C, capped(x_C, cap).to(x_TW.dtype.element_ty), mask=valid_C)


@triton.jit
def embed_block(
    table_VW: tl.tensor,
    token_T: tl.tensor,
    previous_T: tl.tensor,
    out_TW: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    num_rows: tl.tensor,
    first_row: tl.tensor,
    num_own: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Write scale · table[row of the token]; zeros if it is not one of `num_own` rows. Grid: (T, W / C)."""
    begin_kernel()
    place, column_C = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    valid_C = column_C < width
    row = tl.load(token_T + place).to(tl.int64)
    if KIND == PREVIOUS:
        row = tl.maximum(tl.load(previous_T + place).to(tl.int64), 0)
    if KIND == PAIR:
        previous = tl.load(previous_T + place).to(tl.int64)
        row = ((row * 36313) ^ (tl.maximum(previous, 0) * 27191)) % tl.maximum(1, num_rows - 1)
        row = tl.where(previous < 0, num_rows - 1, row)
    row -= first_row
    num_columns = tl.where((row >= 0) & (row < num_own), width, 0)
    x_C = tl.load(table_VW + row * width + column_C, mask=column_C < num_columns, other=0.0).to(tl.float32)
    x_C = x_C * scale
    tl.store(out_TW + place * out_stride + column_C, x_C.to(out_TW.dtype.element_ty), mask=valid_C)
