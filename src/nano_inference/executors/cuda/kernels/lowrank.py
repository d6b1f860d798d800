"""Kernels of adapters: s · (x Aᵀ) Bᵀ, added to the outputs of a projection.

A program computes one token, so that a token's sums have the order of its own rank, whatever else is in the step.

Shapes: T tokens of the step, X places of adapters, M matrices of a projection, R most ranks, N outputs and K inputs,
U ranks and B columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel


@triton.jit(do_not_specialize=["most_ranks"])
def shrink_row(
    x_TK: tl.tensor,
    a_XMRK: tl.tensor,
    rank_XM: tl.tensor,
    index_T: tl.tensor,
    low_TMR: tl.tensor,
    x_stride: tl.tensor,
    num_in: tl.tensor,
    most_ranks: tl.tensor,
    U: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Write x Aᵀ of one matrix for a token whose index is not negative. Grid: (T, M)."""
    begin_kernel()
    token, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(index_T + token).to(tl.int64)
    if index >= 0:
        pair = index * tl.num_programs(1) + matrix
        rank = tl.load(rank_XM + pair)
        for first in range(0, rank, U):
            rank_U = first + tl.arange(0, U)
            at_U = (pair * most_ranks + rank_U) * num_in
            sum_UB = tl.zeros([U, B], tl.float32)
            for start in range(0, num_in, B):
                in_B = start + tl.arange(0, B)
                x_B = tl.load(x_TK + token * x_stride + in_B, mask=in_B < num_in, other=0.0).to(tl.float32)
                mask_UB = (rank_U < rank)[:, None] & (in_B < num_in)[None, :]
                a_UB = tl.load(a_XMRK + at_U[:, None] + in_B[None, :], mask=mask_UB, other=0.0).to(tl.float32)
                sum_UB += a_UB * x_B[None, :]
            low_U = low_TMR + (token * tl.num_programs(1) + matrix) * most_ranks + rank_U
            tl.store(low_U, tl.sum(sum_UB, 1), mask=rank_U < rank)


@triton.jit(do_not_specialize=["most_ranks"])
def expand_block(
    out_TN: tl.tensor,
    b_XNR: tl.tensor,
    rank_XM: tl.tensor,
    scale_XM: tl.tensor,
    start_M: tl.tensor,
    index_T: tl.tensor,
    low_TMR: tl.tensor,
    out_stride: tl.tensor,
    num_out: tl.tensor,
    most_ranks: tl.tensor,
    U: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Add s · low Bᵀ to a block of one matrix's outputs; see `shrink_row`. Grid: (T, blocks of the widest, M)."""
    begin_kernel()
    token, matrix = tl.program_id(0).to(tl.int64), tl.program_id(2)
    index = tl.load(index_T + token).to(tl.int64)
    if index >= 0:
        pair = index * tl.num_programs(2) + matrix
        rank = tl.load(rank_XM + pair)
        first_out = tl.load(start_M + matrix) + tl.program_id(1) * B
        end = tl.load(start_M + matrix + 1)
        if (rank > 0) & (first_out < end):
            out_B = first_out + tl.arange(0, B)
            sum_BU = tl.zeros([B, U], tl.float32)
            for first in range(0, rank, U):
                rank_U = first + tl.arange(0, U)
                low_U = low_TMR + (token * tl.num_programs(2) + matrix) * most_ranks + rank_U
                low_U = tl.load(low_U, mask=rank_U < rank, other=0.0)
                at_B = (index * num_out + out_B) * most_ranks
                mask_BU = (out_B < end)[:, None] & (rank_U < rank)[None, :]
                b_BU = tl.load(b_XNR + at_B[:, None] + rank_U[None, :], mask=mask_BU, other=0.0).to(tl.float32)
                sum_BU += b_BU * low_U[None, :]
            out_at_B = out_TN + token * out_stride + out_B
            total_B = tl.load(out_at_B, mask=out_B < end, other=0.0).to(tl.float32)
            total_B += tl.load(scale_XM + pair) * tl.sum(sum_BU, 1)
            tl.store(out_at_B, total_B.to(out_TN.dtype.element_ty), mask=out_B < end)
