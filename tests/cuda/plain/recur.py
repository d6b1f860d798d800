"""The launchers of `kernels.recur` in plain torch: float32 inside, rounded where the kernels round.

Shapes: T tokens of the step, R rows, P parts of rows, Z slots, C channels, K taps, J = K - 1, H value heads, X key
size, V value size, W width of a buffer, Y heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_convolution, check_delta, check_dtype, check_rows
from nano_inference.executors.cuda.records import States


class _Places(NamedTuple):
    row_T: Tensor  # of other tokens than the rows', any
    is_own_T: Tensor  # tokens of the rows, except those of skipped rows
    begin_R: Tensor  # each row's first token
    row_P: Tensor
    count_P: Tensor  # tokens of the row up to the end of each part
    is_live_R: Tensor
    has_past_R: Tensor
    source_R: Tensor


def convolve(
    out_TC: Tensor,
    x_TC: Tensor,
    weight_C1K: Tensor,
    state_ZJC: Tensor,
    states: States,
    position_T: Tensor,
    *,
    most_tokens: int,
) -> None:
    """Write `models.ops.Convolve`, and the states after each part; rows at negative positions are skipped."""
    check_convolution(out_TC, x_TC, weight_C1K, state_ZJC)
    at, num_past = _places(states, position_T, x_TC.size(0)), weight_C1K.size(2) - 1
    weight_CK, x32_TC = weight_C1K.squeeze(1).float(), x_TC.float()
    token_T = torch.arange(x_TC.size(0), device=x_TC.device)

    def inputs(row: Tensor, place: Tensor) -> Tensor:
        """Return the inputs of rows at places in them; below 0: before their first token."""
        own = x32_TC.index_select(0, (at.begin_R[row] + place).clamp(0, x32_TC.size(0) - 1))
        past = state_ZJC[at.source_R[row], (place + num_past).clamp(0, num_past - 1)]
        past = torch.where(at.has_past_R[row].unsqueeze(-1), past, 0.0)
        return torch.where((place >= 0).unsqueeze(-1), own, past)

    sum_TC = torch.zeros_like(x32_TC)
    for tap in range(num_past + 1):
        sum_TC += weight_CK[:, tap] * inputs(at.row_T, token_T - at.begin_R[at.row_T] - num_past + tap)
    sum_TC = sum_TC.to(out_TC.dtype).float()
    after_PJC = torch.stack([inputs(at.row_P, at.count_P - num_past + j) for j in range(num_past)], dim=1)
    is_own_T1 = at.is_own_T.unsqueeze(-1)
    out_TC.copy_(torch.where(is_own_T1, (sum_TC * _sigmoid(sum_TC)).to(out_TC.dtype), out_TC))
    _write(state_ZJC, after_PJC, states, at)


def gated_delta(
    out_TW: Tensor,
    qkv_TW: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    state_ZHXV: Tensor,
    states: States,
    position_T: Tensor,
    *,
    is_tiled: bool,
) -> None:
    """Write `models.ops.GatedDelta`, and the states after each part; rows at negative positions are skipped."""
    num_keys, num_tokens = check_delta(out_TW, qkv_TW, a_TH, b_TH, state_ZHXV), qkv_TW.size(0)
    _, num_heads, k_dim, v_dim = state_ZHXV.shape
    at = _places(states, position_T, num_tokens)
    each = num_heads // num_keys
    qk_T2KX = qkv_TW[:, : 2 * num_keys * k_dim].float().view(num_tokens, 2, num_keys, k_dim)
    qk_T2KX = qk_T2KX * torch.rsqrt((qk_T2KX * qk_T2KX).sum(-1, keepdim=True) + 1e-6)
    qk_T2HX = qk_T2KX.repeat(1, 1, each, 1) if is_tiled else qk_T2KX.repeat_interleave(each, 2)
    q_THX1, k_THX1 = (qk_T2HX[:, index].unsqueeze(-1) for index in range(2))
    q_THX1 = q_THX1 * k_dim**-0.5
    v_THV = qkv_TW[:, 2 * num_keys * k_dim :].float().view(num_tokens, num_heads, v_dim)
    decay_TH11 = torch.exp(-torch.exp(a_log_H) * _softplus(a_TH.float() + dt_bias_H)).view(num_tokens, num_heads, 1, 1)
    beta_TH1 = _sigmoid(b_TH.float()).to(b_TH.dtype).float().unsqueeze(-1)
    is_own_T1 = at.is_own_T.unsqueeze(-1)
    before_R = torch.where(at.has_past_R.view(-1, 1, 1, 1), state_ZHXV.index_select(0, at.source_R), 0.0)
    after_T = torch.empty(num_tokens, *state_ZHXV.shape[1:], device=out_TW.device)
    size = num_tokens if num_tokens == at.source_R.size(0) else 1  # tokens at a time: all of them are of different rows
    for start in range(0, num_tokens, size):
        own, row_N = slice(start, start + size), at.row_T[start : start + size]
        before_NHXV = before_R.index_select(0, row_N)
        S_NHXV = before_NHXV * decay_TH11[own]
        d_NHV = (v_THV[own] - (S_NHXV * k_THX1[own]).sum(2)) * beta_TH1[own]
        S_NHXV = S_NHXV + k_THX1[own] * d_NHV.unsqueeze(2)
        out_NW = (S_NHXV * q_THX1[own]).sum(2).flatten(1).to(out_TW.dtype)
        out_TW[own].copy_(torch.where(is_own_T1[own], out_NW, out_TW[own]))
        S_NHXV = torch.where(is_own_T1[own, :, None, None], S_NHXV, before_NHXV)
        before_R.index_copy_(0, row_N, S_NHXV)
        after_T[own].copy_(S_NHXV)
    first_R = torch.where(at.has_past_R.view(-1, 1, 1, 1), state_ZHXV.index_select(0, at.source_R), 0.0)
    last_P = (at.begin_R[at.row_P] + at.count_P - 1).clamp(min=0)
    has_tokens_P = (at.count_P > 0).view(-1, 1, 1, 1)
    _write(state_ZHXV, torch.where(has_tokens_P, after_T.index_select(0, last_P), first_R[at.row_P]), states, at)


def gated_norm(out_TW: Tensor, x_TW: Tensor, gate_TW: Tensor, weight_V: Tensor, eps: float) -> None:
    """Write `models.ops.GatedNorm`."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW, gate=gate_TW)
    x_TYV, gate_TYV = (one.float().unflatten(1, (-1, weight_V.size(0))) for one in (x_TW, gate_TW))
    x_TYV = (x_TYV * torch.rsqrt(x_TYV.square().mean(-1, keepdim=True) + eps)).to(out_TW.dtype).float()
    x_TYV = (x_TYV * weight_V.float()).to(out_TW.dtype).float()
    out_TW.copy_((x_TYV * (gate_TYV * _sigmoid(gate_TYV))).flatten(1))


def gate(out_TW: Tensor, x_TW: Tensor, gate_TW: Tensor) -> None:
    """Write `models.ops.Gate`."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW, gate=gate_TW)
    out_TW.copy_(x_TW.float() * _sigmoid(gate_TW.float()).to(out_TW.dtype).float())


def arrange(out_TW: Tensor, x_TW: Tensor, column_W: Tensor) -> None:
    """Write x[:, column] for each column of out."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW)
    out_TW.copy_(x_TW.index_select(1, column_W))


def _sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x). The bits of `torch.sigmoid` on a CPU depend on an element's place in the tensor."""
    return 1.0 / (1.0 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    power = torch.exp(x.clamp(max=20.0))
    total = 1.0 + power
    log = torch.where(total == 1.0, power, torch.log(total) * power / torch.where(total == 1.0, 1.0, total - 1.0))
    return torch.where(x > 20.0, x, log)


def _places(states: States, position_T: Tensor, num_tokens: int) -> _Places:
    part_R, bound_P, source_R = (one.long() for one in (states.part_R, states.bound_P, states.source_R))
    row_bound_R = bound_P.index_select(0, part_R)
    token_T, part_P = (torch.arange(n, device=part_R.device) for n in (num_tokens, states.slot_P.size(0)))
    row_T = torch.searchsorted(row_bound_R[1:].contiguous(), token_T, right=True).clamp(max=source_R.size(0) - 1)
    row_P = torch.searchsorted(part_R[1:].contiguous(), part_P, right=True)
    begin_R = row_bound_R[:-1]
    position_R = position_T.index_select(0, begin_R)
    count_P = bound_P[1:] - begin_R.index_select(0, row_P)
    is_own_T = (token_T >= row_bound_R[0]) & (token_T < row_bound_R[-1]) & (position_R >= 0).index_select(0, row_T)
    return _Places(row_T, is_own_T, begin_R, row_P, count_P, position_R >= 0, position_R > 0, source_R.clamp(min=0))


def _write(state_Z: Tensor, after_P: Tensor, states: States, at: _Places) -> None:
    """Write states to slots. Parts that write none repeat the first write; if there is none, a slot keeps its state."""
    writes_P = at.is_live_R[at.row_P] & (states.slot_P >= 0)
    index_P = torch.arange(writes_P.size(0), device=writes_P.device)
    part_P = torch.where(writes_P, index_P, writes_P.int().argmax())
    slot_P = torch.where(writes_P.any(), states.slot_P.long().index_select(0, part_P), 0)
    held_P = state_Z.index_select(0, slot_P)
    state_Z.index_copy_(0, slot_P, torch.where(writes_P.any(), after_P.index_select(0, part_P), held_P))
