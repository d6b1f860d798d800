"""The launchers of `kernels.operate` in plain torch: float32 inside, rounded where the kernels round.

Shapes: T tokens of the step, W width of a buffer, R rows of the step, B blocks per row, S slots of the cache, H heads,
J kv heads, Y heads of one or several buffers, D head size, L positions, F rotary size / 2, V rows of a table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_dtype, check_heads_of_rows, check_norm, check_rows
from nano_inference.executors.cuda.records import Cache, HeadNorms
from nano_inference.executors.torch.ops import pair_rows
from nano_inference.models.ops import Activation, TablePart, TableRows

_GELU = math.sqrt(2 / math.pi)


def norm(
    out_TW: Tensor,
    x_TW: Tensor,
    weight_W: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    more_TW: Tensor | None = None,
    sum_TW: Tensor | None = None,
) -> None:
    """Write `models.ops.Norm` of x to out. With `more` and `sum`: write x + more to sum, and its norm to out."""
    check_norm(out_TW, x_TW, more_TW, sum_TW)
    x32_TW = x_TW.float()
    if more_TW is not None and sum_TW is not None:
        x32_TW = _rounded(x32_TW + more_TW.float(), sum_TW.dtype)
        sum_TW.copy_(x32_TW)
    out_TW.copy_(_normalised(x32_TW, weight_W, eps, offset, out_TW.dtype))


def rotate_and_store(
    q_THD: Tensor,
    qkv_TW: Tensor,
    cos_LF: Tensor | None,
    sin_LF: Tensor | None,
    position_T: Tensor,
    row_T: Tensor,
    cache: Cache,
    norms: HeadNorms,
) -> None:
    """Write normalised and rotated queries [T, H, D], and keys and values to the cache.

    Tokens at negative positions are skipped.
    """
    check_heads_of_rows(q_THD, qkv_TW, cos_LF, cache)
    num_heads, head_dim = q_THD.shape[1:]
    qkv_TYD = qkv_TW.view(-1, qkv_TW.size(1) // head_dim, head_dim)
    q_TYD, k_TYD, v_TYD = torch.split(qkv_TYD, [num_heads, cache.k_SJD.size(1), cache.v_SJD.size(1)], dim=1)
    place_T = position_T.long().clamp(min=0)
    angles = None
    if cos_LF is not None and sin_LF is not None:
        angles = (cos_LF.index_select(0, place_T), sin_LF.index_select(0, place_T))
    is_live_T11 = (position_T >= 0).view(-1, 1, 1)
    turned_THD = _turned(q_TYD, norms, norms.q_D, angles).to(q_THD.dtype)
    q_THD.copy_(torch.where(is_live_T11, turned_THD, q_THD))
    _store(cache, _turned(k_TYD, norms, norms.k_D, angles), v_TYD, position_T, row_T)


def activate(out_TW: Tensor, gate_TW: Tensor, up_TW: Tensor | None, kind: Activation) -> None:
    """Write act(gate) · up, or relu(gate)²."""
    check_dtype("gate", gate_TW)
    check_rows(out=out_TW, gate=gate_TW, **({} if up_TW is None else {"up": up_TW}))
    x_TW = gate_TW.float()
    if kind == "relu_squared":
        out_TW.copy_(x_TW.clamp(min=0).square())
        return
    up32_TW = (gate_TW if up_TW is None else up_TW).float()
    act_TW = x_TW * _sigmoid(x_TW)
    if kind == "gelu_tanh":
        act_TW = 0.5 * x_TW * (1.0 + torch.tanh(_GELU * (x_TW + 0.044715 * x_TW * x_TW * x_TW)))
    out_TW.copy_(_rounded(act_TW, out_TW.dtype) * up32_TW)


def mix(out_TW: Tensor, x_TW: Tensor, y_TW: Tensor, a_1: Tensor | None, b_1: Tensor, sign: int) -> None:
    """Write a · x + sign · b · y; each product is rounded. `a_1` and `b_1` are float32 numbers on the device."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW, y=y_TW)
    x32_TW = x_TW.float()
    if a_1 is not None:
        x32_TW = _rounded(a_1.float() * x32_TW, out_TW.dtype)
    out_TW.copy_(x32_TW + sign * _rounded(b_1.float() * y_TW.float(), out_TW.dtype))


def gate_values(v_TW: Tensor, gate_TJ: Tensor, more_TW: Tensor, head_dim: int, scale: float) -> None:
    """Add scale · sigmoid(gate) · more to v in place."""
    check_dtype("v", v_TW)
    check_rows(v=v_TW, gate=gate_TJ, more=more_TW)
    v_TJD, more_TJD = (x_TW.view(x_TW.size(0), -1, head_dim) for x_TW in (v_TW, more_TW))
    factor_TJ1 = (scale * _sigmoid(gate_TJ.float())).unsqueeze(-1)
    v_TJD.copy_(v_TJD.float() + factor_TJ1 * more_TJD.float())


def smear(x_TW: Tensor, gate_T1: Tensor, before_TW: Tensor, share_1: Tensor, previous_T: Tensor) -> None:
    """Add share · sigmoid(gate) · before to x in place where `previous_T` is not negative."""
    check_dtype("x", x_TW)
    check_rows(x=x_TW, before=before_TW)
    factor_T1 = share_1.float() * _sigmoid(gate_T1.float())
    smeared_TW = (x_TW.float() + factor_T1 * before_TW.float()).to(x_TW.dtype)
    x_TW.copy_(torch.where((previous_T >= 0).unsqueeze(-1), smeared_TW, x_TW))


def softcap(x_TW: Tensor, cap: float) -> None:
    """Replace x by cap · tanh(x / cap)."""
    check_dtype("x", x_TW)
    check_rows(x=x_TW)
    x_TW.copy_(cap * torch.tanh(x_TW.float() / cap))


def embed(
    out_TW: Tensor,
    table_VW: Tensor,
    token_T: Tensor,
    previous_T: Tensor,
    rows: TableRows = "token",
    scale: float = 1.0,
    part: TablePart | None = None,
) -> None:
    """Write rows of a table, times `scale` in the table's precision."""
    check_dtype("table", table_VW)
    check_rows(out=out_TW, table=table_VW)
    row_T = token_T.long()
    if rows == "previous":
        row_T = previous_T.long().clamp(min=0)
    elif rows == "pair":
        num_rows = table_VW.size(0) if part is None else part.num_rows
        row_T = pair_rows(token_T.long(), previous_T.long(), num_rows)
    own_T = row_T - (0 if part is None else part.first_row)
    is_own_T = (own_T >= 0) & (own_T < table_VW.size(0))
    x_TW = table_VW.index_select(0, own_T.masked_fill(~is_own_T, 0)).float()
    x_TW = x_TW.masked_fill(~is_own_T.unsqueeze(-1), 0.0)
    rounded_scale = torch.full((), scale, dtype=table_VW.dtype, device=table_VW.device).float()
    out_TW.copy_(x_TW * rounded_scale)


def _sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x). The bits of `torch.sigmoid` on a CPU depend on an element's place in the tensor."""
    return 1.0 / (1.0 + torch.exp(-x))


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to a precision, as float32."""
    return x.to(dtype).float()


def _normalised(x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """Return x / rms(x) · (offset + weight) in float32; without an offset, x / rms(x) is rounded first."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return x
    return x * (offset + weight.float()) if offset else _rounded(x, dtype) * weight.float()


def _turned(x_TYD: Tensor, norms: HeadNorms, weight_D: Tensor | None, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return heads, float32, after their norm, before or after the rotation by `angles`: cos and sin, [T, F]."""
    dtype = x_TYD.dtype
    x_TYD = x_TYD.float()
    if norms.order == "first":
        x_TYD = _rounded(_normalised(x_TYD, weight_D, norms.eps, norms.offset, dtype), dtype)
    if angles is not None:
        cos_T1F, sin_T1F = (x_TF.unsqueeze(1).float() for x_TF in angles)
        half = cos_T1F.size(-1)
        low_TYF, high_TYF, rest = torch.split(x_TYD, [half, half, x_TYD.size(-1) - 2 * half], dim=-1)
        new_low_TYF = _rounded(low_TYF * cos_T1F, dtype) - high_TYF * sin_T1F
        new_high_TYF = _rounded(high_TYF * cos_T1F, dtype) + low_TYF * sin_T1F
        x_TYD = torch.cat((_rounded(new_low_TYF, dtype), _rounded(new_high_TYF, dtype), rest), dim=-1)
    if norms.order == "last":
        x_TYD = _rounded(_normalised(x_TYD, weight_D, norms.eps, norms.offset, dtype), dtype)
    return x_TYD


def _store(cache: Cache, k_TJD: Tensor, v_TJD: Tensor, position_T: Tensor, row_T: Tensor) -> None:
    """Write keys and values of live tokens to the cache.

    Skipped tokens repeat the write of the first live token, so that equal slots get equal values. If no token is live,
    all of them write back what a slot holds.
    """
    is_live_T = position_T >= 0
    index_T = torch.arange(position_T.size(0), device=position_T.device)
    source_T = torch.where(is_live_T, index_T, is_live_T.int().argmax())
    at_T = position_T.long().index_select(0, source_T).clamp(min=0)
    num_rows, num_blocks = cache.table_RB.shape
    table_row_T = row_T.long().index_select(0, source_T).clamp(0, num_rows - 1)
    block_T = cache.table_RB[table_row_T, (at_T // cache.block_size).clamp(max=num_blocks - 1)].long()
    slot_T = (block_T * cache.block_size + at_T % cache.block_size).clamp(0, cache.k_SJD.size(0) - 1)
    slot_T = torch.where(is_live_T.any(), slot_T, 0)
    for x_SJD, new_TJD in ((cache.k_SJD, k_TJD), (cache.v_SJD, v_TJD)):
        chosen_TJD = new_TJD.to(x_SJD.dtype).index_select(0, source_T)
        held_TJD = x_SJD.index_select(0, slot_T)
        x_SJD.index_copy_(0, slot_T, torch.where(is_live_T.any(), chosen_TJD, held_TJD))
