"""The operations of `models.ops` in torch, on any device: the reference for every other executor.

Shapes: T tokens of the step, W width of a buffer, N outputs and K inputs of a matrix, J kv heads, Y heads of one or
several buffers, D head size, R rotary size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.models.ops import Activation, GatedDelta, TablePart, TableRows

_SWAPPED_ROWS = range(3, 49)
_PAIR_FACTORS = (36313, 27191)


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return x W^T + b, [T, N]; in column-major layout if that product is faster.

    On a CPU, MKL's float32 product of a few dozen rows is about twice as fast with the weights as its left factor
    (measured in docs/performance.md), unlike with one or two rows or with many.
    """
    if x_TK.device.type != "cpu" or x_TK.size(0) not in _SWAPPED_ROWS:
        return functional.linear(x_TK, weight_NK, bias_N)
    out_NT = torch.mm(weight_NK, x_TK.t())
    return out_NT.t() if bias_N is None else out_NT.add_(bias_N.unsqueeze(-1)).t()


def embed(
    table_NW: Tensor,
    token_T: Tensor,
    previous_T: Tensor,
    rows: TableRows = "token",
    scale: Tensor | None = None,
    part: TablePart | None = None,
    *,
    sparse: bool = False,
) -> Tensor:
    """Return rows of a table, multiplied by `scale` (in the table's precision) if it is given.

    Zeros for rows that are not in `part`. A `sparse` gradient holds the rows alone.
    """
    row_T = token_T
    if rows == "previous":
        row_T = previous_T.clamp(min=0)
    elif rows == "pair":
        row_T = pair_rows(token_T, previous_T, table_NW.size(0) if part is None else part.num_rows)
    if part is None:
        x_TW = functional.embedding(row_T, table_NW, sparse=sparse)
    else:
        own_T = row_T - part.first_row
        is_own_T = (own_T >= 0) & (own_T < table_NW.size(0))
        x_TW = functional.embedding(torch.where(is_own_T, own_T, 0), table_NW)
        x_TW = torch.where(is_own_T.unsqueeze(-1), x_TW, 0)
    return x_TW if scale is None else x_TW * scale


def pair_rows(token_T: Tensor, previous_T: Tensor, num_rows: int) -> Tensor:
    """Return each token's row in the table of hashed token pairs, [T]; the last row if there is no previous token."""
    ours, theirs = _PAIR_FACTORS
    row_T = torch.bitwise_xor(token_T * ours, previous_T * theirs) % max(1, num_rows - 1)
    return torch.where(previous_T < 0, num_rows - 1, row_T)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return x / rms(x) · (offset + weight) over the last dimension, in x's dtype."""
    x32 = x.float()
    mean_square: Tensor = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.size(-1))
    x32 = x32 * mean_square.add_(eps).rsqrt_()
    if weight is None:
        return x32.to(x.dtype)
    if offset:
        return (x32 * (offset + weight.float())).to(x.dtype)
    return x32.to(x.dtype) * weight


def heads(x_TW: Tensor, head_dim: int) -> Tensor:
    """Return a buffer as heads [T, Y, D]."""
    return x_TW.reshape(x_TW.size(0), x_TW.size(1) // head_dim, head_dim)


def unit(x: Tensor) -> Tensor:
    """Return x / sqrt(sum x² + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def delta_inputs(
    op: GatedDelta, q_TW: Tensor, k_TW: Tensor, a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rule's q' and k' [T, H, X] of every value head, g and beta [T, H], in the numbers' precision."""
    wide, each = a_log_H.dtype, op.num_v_heads // op.num_k_heads
    q_THX, k_THX = (unit(heads(x_TW, op.k_dim).to(wide)) for x_TW in (q_TW, k_TW))
    if op.is_tiled:
        q_THX, k_THX = q_THX.repeat(1, each, 1), k_THX.repeat(1, each, 1)
    else:
        q_THX, k_THX = q_THX.repeat_interleave(each, dim=1), k_THX.repeat_interleave(each, dim=1)
    g_TH = -a_log_H.exp() * functional.softplus(a_TH.to(wide) + dt_bias_H)
    return q_THX * op.k_dim**-0.5, k_THX, g_TH, b_TH.sigmoid().to(wide)


def gated_norm(x_TYV: Tensor, gate_TYV: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight · x / rms(x) · silu(gate) over the last dimension, in x's dtype."""
    normed_TYV = rms_norm(x_TYV, weight, eps, 0.0)
    return (normed_TYV * functional.silu(gate_TYV.float())).to(x_TYV.dtype)


def rotate(x_TYD: Tensor, cos_T1R: Tensor, signed_sin_T1R: Tensor) -> Tensor:
    """Rotate the first R of D dimensions (RoPE); dimension i is paired with i + R/2 (GPT-NeoX layout).

    The first half of `signed_sin` is negated.
    """
    rotary_dim = cos_T1R.size(-1)
    x_TYR = x_TYD[..., :rotary_dim]
    turned_TYR = torch.addcmul(x_TYR * cos_T1R, x_TYR.roll(rotary_dim // 2, dims=-1), signed_sin_T1R)
    if rotary_dim == x_TYD.size(-1):
        return turned_TYR
    return torch.cat((turned_TYR, x_TYD[..., rotary_dim:]), dim=-1)


def activate(kind: Activation, gate_TW: Tensor, up_TW: Tensor | None) -> Tensor:
    """Return act(gate) · up, or relu(gate)² without `up`."""
    if up_TW is None:
        return functional.relu(gate_TW).square()
    act_TW = functional.silu(gate_TW) if kind == "silu" else functional.gelu(gate_TW, approximate="tanh")
    return act_TW * up_TW


def gate_values(v_TJD: Tensor, gate_TJ: Tensor, more_TW: Tensor, scale: float) -> Tensor:
    """Return v + scale · sigmoid(gate) · more."""
    return v_TJD + (scale * torch.sigmoid(gate_TJ)).unsqueeze(-1) * more_TW.view(v_TJD.shape)


def smear(x_TW: Tensor, gate_T1: Tensor, before_TW: Tensor, share: Tensor, previous_T: Tensor) -> Tensor:
    """Return x + share · sigmoid(gate) · before; x where there is no previous token. `share` is a 0-d tensor."""
    smeared_TW = x_TW + share * torch.sigmoid(gate_T1) * before_TW
    return torch.where((previous_T < 0).unsqueeze(-1), x_TW, smeared_TW)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap)."""
    return torch.tanh(x / cap) * cap
