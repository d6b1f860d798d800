"""Launcher of the kernels in `lowrank`. Shapes: T tokens of the step, N outputs and K inputs of a projection."""

from __future__ import annotations

from torch import Tensor

from nano_inference.executors.cuda.checks import check_adapters
from nano_inference.executors.cuda.kernels import lowrank
from nano_inference.executors.cuda.kernels.variant import Variant
from nano_inference.executors.cuda.records import LowRankStack


def shrink_variant() -> Variant:
    """Return the constants of the first kernel of `add_adapters`."""
    return Variant(constants={"U": 16, "B": 256}, num_warps=4)


def expand_variant() -> Variant:
    """Return the constants of its second kernel."""
    return Variant(constants={"U": 16, "B": 64}, num_warps=4)


def add_adapters(out_TN: Tensor, x_TK: Tensor, stack: LowRankStack, index_T: Tensor) -> None:
    """Add s · (x Aᵀ) Bᵀ to the outputs of each token; `index_T` are the places of their adapters, negative for none."""
    check_adapters(out_TN, x_TK, stack, index_T)
    num_tokens, num_matrices, most_ranks = x_TK.size(0), stack.rank_XM.size(1), stack.a_XMRK.size(2)
    shrink_variant().launch(
        lowrank.shrink_row,
        (num_tokens, num_matrices),
        *(x_TK, stack.a_XMRK, stack.rank_XM, index_T, stack.low_TMR, x_TK.stride(0), x_TK.size(1), most_ranks),
    )
    variant = expand_variant()
    variant.launch(
        lowrank.expand_block,
        (num_tokens, -(-stack.widest // variant.constants["B"]), num_matrices),
        *(out_TN, stack.b_XNR, stack.rank_XM, stack.scale_XM, stack.start_M, index_T, stack.low_TMR),
        *(out_TN.stride(0), out_TN.size(1), most_ranks),
    )
