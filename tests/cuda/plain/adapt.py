"""The launcher of `kernels.adapt` in plain torch. Shapes: T tokens, M matrices, R ranks, N outputs and K inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_adapters
from nano_inference.executors.cuda.records import LowRankStack


def add_adapters(out_TN: Tensor, x_TK: Tensor, stack: LowRankStack, index_T: Tensor) -> None:
    """Add s · (x Aᵀ) Bᵀ to the outputs of each token, whose sums do not depend on the other tokens."""
    check_adapters(out_TN, x_TK, stack, index_T)
    place_T = index_T.long().clamp(min=0)
    rank_TM = torch.where(index_T.unsqueeze(-1) >= 0, stack.rank_XM[place_T], 0)
    is_own_TMR = torch.arange(stack.a_XMRK.size(2), device=x_TK.device) < rank_TM.unsqueeze(-1)
    low_TMR = (stack.a_XMRK[place_T].float() * x_TK.float()[:, None, None]).sum(-1)
    low_TMR = torch.where(is_own_TMR, low_TMR, 0.0)
    matrix_N = (torch.arange(out_TN.size(1), device=x_TK.device).unsqueeze(-1) >= stack.start_M[1:]).sum(-1)
    more_TNR = torch.where(is_own_TMR[:, matrix_N], stack.b_XNR[place_T].float(), 0.0) * low_TMR[:, matrix_N]
    total_TN = out_TN.float() + stack.scale_XM[place_T][:, matrix_N] * more_TNR.sum(-1)
    out_TN.copy_(torch.where(rank_TM[:, matrix_N] > 0, total_TN.to(out_TN.dtype), out_TN))
