"""The operations with recurrent states in torch: a causal convolution and the gated delta rule.

Shapes: Z slots, T tokens of the step, B rows of one token, Q tokens of a chunk, C channels, K taps, J = K - 1, H value
heads, X key size, V value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.executors.states import ends_of
from nano_inference.executors.step_input import Span

CHUNK = 64
_MOST_VALUES = 1 << 24  # values of states that rows of one token read at a time


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Which slots a step's rows read and write."""

    token_B: Tensor  # rows of one token: the token's index among T
    source_B: Tensor
    is_first_B: Tensor  # the sequence's first token: the state before it is zero
    writes: tuple[tuple[int, int], ...]  # (row of B, slot)
    chunks: tuple[Span, ...]  # the other rows

    def pieces(self, values_per_row: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Yield token, source and is_first of a few rows of one token, and the row and slot of their writes."""
        size = max(1, _MOST_VALUES // values_per_row)
        for start in range(0, len(self.token_B), size):
            rows = slice(start, start + size)
            writes = [(row - start, slot) for row, slot in self.writes if start <= row < start + size]
            row_N, slot_N = torch.tensor(writes, device=self.token_B.device).unbind(1)
            yield self.token_B[rows], self.source_B[rows], self.is_first_B[rows], row_N, slot_N


def plan_states(spans: Sequence[Span], device: torch.device) -> StatePlan:
    """Return the plan of a step's rows, which all have slots."""
    single = [span for span in spans if span.num_tokens == 1]
    rows: list[tuple[int, int, int]] = []
    writes: list[tuple[int, int]] = []
    for row, span in enumerate(single):
        assert span.state is not None, "a row without slots"
        rows.append((span.offset, span.state.source if span.start else 0, int(span.start == 0)))
        writes += [(row, slot) for _, slot in ends_of(span.state, span.end)]
    token_B, source_B, is_first_B = torch.tensor(rows, dtype=torch.long, device=device).view(-1, 3).unbind(1)
    chunks = tuple(span for span in spans if span.num_tokens > 1)
    return StatePlan(token_B, source_B, is_first_B.bool(), tuple(writes), chunks)


def _before(state_Z: Tensor, span: Span) -> Tensor:
    """Return the state before a row's first token."""
    assert span.state is not None, "a row without slots"
    return state_Z[span.state.source] if span.start else torch.zeros_like(state_Z[0])


def convolve(x_TC: Tensor, weight_CK: Tensor, state_ZJC: Tensor, plan: StatePlan) -> Tensor:
    """Return silu of the causal convolution; a state holds the last J rows of x."""
    out_TC = torch.empty_like(x_TC)
    for token_B, source_B, is_first_B, row_N, slot_N in plan.pieces(state_ZJC[0].numel()):
        past_BJC = torch.where(is_first_B[:, None, None], 0.0, state_ZJC[source_B])
        window_BKC = torch.cat((past_BJC, x_TC[token_B][:, None].float()), dim=1)
        state_ZJC[slot_N] = window_BKC[row_N, 1:]
        out_TC[token_B] = (window_BKC * weight_CK.t().float()).sum(dim=1).to(x_TC.dtype)
    for span in plan.chunks:
        assert span.state is not None
        rows = slice(span.offset, span.offset + span.num_tokens)
        window_SC = torch.cat((_before(state_ZJC, span).to(x_TC.dtype), x_TC[rows]))
        out_TC[rows] = causal(window_SC, weight_CK)
        for end, slot in ends_of(span.state, span.end):
            state_ZJC[slot] = window_SC[end - span.start :][: state_ZJC.size(1)]
    return functional.silu(out_TC)


def causal(window_SC: Tensor, weight_CK: Tensor) -> Tensor:
    """Return the convolution of S rows, without padding: [S - K + 1, C]."""
    return functional.conv1d(window_SC.t()[None], weight_CK[:, None], groups=weight_CK.size(0))[0].t()


def gated_delta(
    q_THX: Tensor, k_THX: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, state_ZHXV: Tensor, plan: StatePlan
) -> Tensor:
    """Return the outputs of the rule [T, H, V], float32; q and k are normalised, and there is one of each value head.

    Rows of one token are computed together; others in chunks on a grid of `CHUNK` positions from the sequence's start.
    """
    out_THV = torch.empty_like(v_THV)
    for token_B, source_B, is_first_B, row_N, slot_N in plan.pieces(state_ZHXV[0].numel()):
        S_BHXV = torch.where(is_first_B[:, None, None, None], 0.0, state_ZHXV[source_B])
        S_BHXV *= g_TH[token_B].exp()[..., None, None]
        k_BHX, beta_BH1 = k_THX[token_B], beta_TH[token_B][..., None]
        delta_BHV = (v_THV[token_B] - (k_BHX[:, :, None] @ S_BHXV)[:, :, 0]) * beta_BH1
        S_BHXV.addcmul_(k_BHX[..., None], delta_BHV[:, :, None])
        out_THV[token_B] = (q_THX[token_B][:, :, None] @ S_BHXV)[:, :, 0]
        state_ZHXV[slot_N] = S_BHXV[row_N]
    for span in plan.chunks:
        assert span.state is not None
        S_HXV, position = _before(state_ZHXV, span), span.start
        for end, slot in ends_of(span.state, span.end):
            rows = slice(span.offset + position - span.start, span.offset + end - span.start)
            given = (q_THX[rows], k_THX[rows], v_THV[rows], g_TH[rows], beta_TH[rows])
            out_THV[rows], S_HXV = advanced(*given, S_HXV, position)
            state_ZHXV[slot] = S_HXV
            position = end
    return out_THV


def advanced(
    q_SHX: Tensor, k_SHX: Tensor, v_SHV: Tensor, g_SH: Tensor, beta_SH: Tensor, S_HXV: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Return the outputs of consecutive tokens, of which the first is at `position`, and the state after them."""
    outs: list[Tensor] = []
    at, stop = 0, q_SHX.size(0)
    while at < stop:
        end = min(stop, at + CHUNK - (position + at) % CHUNK)
        part = slice(at, end)
        out_QHV, S_HXV = _chunk(q_SHX[part], k_SHX[part], v_SHV[part], g_SH[part], beta_SH[part], S_HXV)
        outs.append(out_QHV)
        at = end
    return torch.cat(outs) if outs else torch.empty_like(v_SHV), S_HXV


def _chunk(
    q_QHX: Tensor, k_QHX: Tensor, v_QHV: Tensor, g_QH: Tensor, beta_QH: Tensor, S_HXV: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the state by several tokens at once (arXiv 2412.06464, section 3.3).

    With c the sums of g up to each token, U = beta (v - what the state holds under k before that token) solves
    (I + A) U = beta (v - exp(c) k S) with A[i, j] = beta_i exp(c_i - c_j) k_i·k_j below the diagonal.
    """
    q, k, v = (one.transpose(0, 1) for one in (q_QHX, k_QHX, v_QHV))
    c_HQ, beta_HQ1 = g_QH.t().cumsum(1), beta_QH.t()[..., None]
    decay_HQQ = (c_HQ[:, :, None] - c_HQ[:, None]).tril().exp().tril()
    grown_HQ1 = c_HQ.exp()[..., None]
    A_HQQ = (beta_HQ1 * (k @ k.mT) * decay_HQQ).tril(-1)
    U_HQV = torch.linalg.solve_triangular(
        A_HQQ, beta_HQ1 * (v - grown_HQ1 * (k @ S_HXV)), upper=False, unitriangular=True
    )
    out_HQV = grown_HQ1 * (q @ S_HXV) + (q @ k.mT * decay_HQQ) @ U_HQV
    left_HQ1 = (c_HQ[:, -1:] - c_HQ).exp()[..., None]
    S_HXV = S_HXV * c_HQ[:, -1].exp()[:, None, None] + (k * left_HQ1).mT @ U_HQV
    return out_HQV.transpose(0, 1), S_HXV
