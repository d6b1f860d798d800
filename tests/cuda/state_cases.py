"""The kernels of layers with recurrent states against `executors.torch`, in float64 or in the same precision.

Shapes: T tokens, Z slots, C channels, K taps, J = K - 1, H value heads, X key size, V value size, W width of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nano_inference.core.step import RowState
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.passes import TokenRow, states_of
from nano_inference.executors.cuda.records import States
from nano_inference.executors.step_input import Span
from nano_inference.executors.torch import ops as reference
from nano_inference.executors.torch.states import advanced, causal
from nano_inference.models.ops import GatedDelta, WeightSpec
from tests.cuda.case import Case, error
from tests.cuda.pointwise_cases import BOUNDS, relative, rows

_NUM_SLOTS = 10


@dataclass(frozen=True)
class Steps:
    """Rows of a step: some are skipped, start from zeros, from another slot, or from one that they overwrite early."""

    rows: tuple[tuple[int, int, RowState], ...] = (  # position of the first token (-1: skipped), tokens, slots
        (0, 1, RowState(0, 0)),
        (7, 1, RowState(1, 2)),
        (-1, 1, RowState(3, 3)),
        (5, 1, RowState(3, 3, ((6, 4),))),
        (0, 9, RowState(5, 5, ((1, 6),))),
        (9, 36, RowState(7, 8, ((10, 8), (44, 9)))),
    )

    @property
    def spans(self) -> list[Span]:
        """The rows that are computed."""
        found, offset = [], 0
        for start, size, state in self.rows:
            if start >= 0:
                found.append(Span(offset, size, start, (), state))
            offset += size
        return found

    def on(self, device: torch.device) -> tuple[States, Tensor]:
        """Return what the kernels are given: slots, and positions of the tokens."""
        given = [TokenRow((0,) * size, -1, max(start, 0), (), state) for start, size, state in self.rows]
        position_T = [start + i if start >= 0 else -1 for start, size, _ in self.rows for i in range(size)]
        return states_of(given, device), torch.tensor(position_T, dtype=torch.int32, device=device)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _before(state_Z: Tensor, span: Span) -> Tensor:
    assert span.state is not None
    return state_Z[span.state.source].double() if span.start else torch.zeros_like(state_Z[0], dtype=torch.double)


def _ends(span: Span) -> list[tuple[int, int]]:
    """Return (number of the row's tokens, slot) of each write."""
    assert span.state is not None
    return [(count - span.start, slot) for count, slot in (*span.state.saves, (span.end, span.state.slot))]


def convolution(kernels: Kernels, device: torch.device, dtype: torch.dtype, taps: int, steps: Steps) -> float:
    """Return the largest difference of outputs and of all slots, of rows computed together."""
    states, position_T = steps.on(device)
    size, channels = len(position_T), 70
    x_TC, weight_C1K = _random(1, size, channels + 9).to(dtype)[:, :channels], _random(2, channels, 1, taps).to(dtype)
    state_ZJC = _random(3, _NUM_SLOTS, taps - 1, channels).to(dtype).float()
    out_TC, mine_ZJC = torch.full((size, channels), 7.0, dtype=dtype, device=device), state_ZJC.clone().to(device)
    given = (x_TC.to(device), weight_C1K.to(device), mine_ZJC, states, position_T)
    kernels.recur.convolve(out_TC, *given, most_tokens=max(count for _, count, _ in steps.rows))
    right_TC, right_ZJC = torch.full((size, channels), 7.0, dtype=torch.double), state_ZJC.clone()
    for span in steps.spans:
        own = slice(span.offset, span.offset + span.num_tokens)
        window_SC = torch.cat((_before(state_ZJC, span), x_TC[own].double()))
        sum_TC = causal(window_SC, weight_C1K.squeeze(1).double()).to(dtype).double()
        right_TC[own] = torch.nn.functional.silu(sum_TC)
        for count, slot in _ends(span):
            right_ZJC[slot] = window_SC[count : count + taps - 1].float()
    return max(relative(out_TC, right_TC), error(mine_ZJC, right_ZJC))


def rule(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], steps: Steps, *,
    is_tiled: bool = False,
) -> float:  # fmt: skip
    """Return the largest difference of outputs and of all slots, of rows computed together."""
    num_k, num_v, k_dim, v_dim = sizes
    states, position_T = steps.on(device)
    size, keys = len(position_T), num_k * k_dim
    qkv_TW = _random(1, size, 2 * keys + num_v * v_dim).to(dtype)
    a_TH, b_TH = _random(2, size, num_v + 3).to(dtype)[:, 3:], (2 * _random(3, size, num_v)).to(dtype)
    a_log_H, dt_bias_H = _random(4, num_v) - 2, _random(5, num_v) - 1
    state_ZHXV = _random(6, _NUM_SLOTS, num_v, k_dim, v_dim)
    out_TW, mine_ZHXV = (
        torch.full((size, num_v * v_dim), 7.0, dtype=dtype, device=device),
        state_ZHXV.clone().to(device),
    )
    numbers = [one.to(device) for one in (qkv_TW, a_TH, b_TH, a_log_H, dt_bias_H)]
    kernels.recur.gated_delta(out_TW, *numbers, mine_ZHXV, states, position_T, is_tiled=is_tiled)
    weight = WeightSpec("", ())
    op = GatedDelta(
        q="", k="", v="", a="", b="", out="", a_log=weight, dt_bias=weight, num_k_heads=num_k, num_v_heads=num_v,
        k_dim=k_dim, v_dim=v_dim, state=0, is_tiled=is_tiled,
    )  # fmt: skip
    q_TW, k_TW, v_TW = torch.split(qkv_TW, [keys, keys, num_v * v_dim], dim=1)
    inputs = reference.delta_inputs(op, q_TW, k_TW, a_TH, b_TH, a_log_H.double(), dt_bias_H.double())
    q_THX, k_THX, g_TH, beta_TH = inputs
    v_THV = reference.heads(v_TW, v_dim).double()
    right_TW, right_ZHXV = torch.full(out_TW.shape, 7.0, dtype=torch.double), state_ZHXV.double()
    for span in steps.spans:
        S_HXV, begin = _before(state_ZHXV, span), 0
        for count, slot in _ends(span):
            own = slice(span.offset + begin, span.offset + count)
            parts = (q_THX[own], k_THX[own], v_THV[own], g_TH[own], beta_TH[own])
            out_THV, S_HXV = advanced(*parts, S_HXV, span.start + begin)
            right_TW[own], right_ZHXV[slot], begin = out_THV.flatten(1), S_HXV, count
    return max(relative(out_TW, right_TW), error(mine_ZHXV, right_ZHXV))


def step_dependence(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    """Return how many bits of outputs and states differ if a row's tokens are computed in steps, beside other rows."""
    num_k, num_v, k_dim, v_dim, taps = 1, 2, 20, 11, 4
    size, channels = 13, 2 * num_k * k_dim + num_v * v_dim
    x_TC, weight_C1K = (
        _random(1, size, channels).to(dtype).to(device),
        _random(2, channels, 1, taps).to(dtype).to(device),
    )
    a_TH, b_TH = (_random(seed, size, num_v).to(dtype).to(device) for seed in (3, 4))
    numbers = [_random(seed, num_v).to(device) for seed in (5, 6)]

    def computed(bounds: list[int], others: int) -> tuple[Tensor, ...]:
        conv_ZJC = torch.zeros(_NUM_SLOTS, taps - 1, channels, device=device)
        rule_ZHXV = torch.zeros(_NUM_SLOTS, num_v, k_dim, v_dim, device=device)
        outs = []
        for begin, end in pairwise(bounds):
            places = [*[0] * others, *range(begin, end)]
            given = [TokenRow((0,), -1, 0, (), RowState(index, index)) for index in range(others)]
            given.append(TokenRow((0,) * (end - begin), -1, begin, (), RowState(8, 8)))
            states = states_of(given, device)
            position_T = torch.tensor([*[0] * others, *range(begin, end)], dtype=torch.int32, device=device)
            mixed_TC = torch.empty(len(places), channels, dtype=dtype, device=device)
            kernels.recur.convolve(
                *(mixed_TC, x_TC[places], weight_C1K, conv_ZJC, states, position_T), most_tokens=end - begin
            )
            out_TW = torch.empty(len(places), num_v * v_dim, dtype=dtype, device=device)
            given_TH = (a_TH[places], b_TH[places])
            kernels.recur.gated_delta(
                *(out_TW, mixed_TC, *given_TH, *numbers, rule_ZHXV, states, position_T), is_tiled=False
            )
            outs.append(out_TW[others:])
        return torch.cat(outs), conv_ZJC[8], rule_ZHXV[8]

    whole = computed([0, size], 0)
    ways = [computed(list(range(size + 1)), 3), computed([0, 1, 3, 12, 13], 1)]
    return float(sum((a != b).sum() for way in ways for a, b in zip(way, whole, strict=True)))


def gates(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    """Compare the norm with a gate, the gate, and columns in another order."""
    x, gate, weight = rows(1, dtype), rows(2, dtype), rows(3, dtype, 44)[0].contiguous()
    x_on, gate_on = x.to(device), gate.to(device)
    out = torch.empty(x.shape, dtype=dtype, device=device)
    kernels.recur.gated_norm(out, x_on, gate_on, weight.to(device), 1e-5)
    heads_TYV = (reference.heads(one, 44) for one in (x, gate))
    worst = relative(out, reference.gated_norm(*heads_TYV, weight, 1e-5).flatten(1))
    kernels.recur.gate(out, x_on, gate_on)
    worst = max(worst, relative(out, x * gate.sigmoid()))
    column_W = torch.arange(x.size(1), dtype=torch.int32).flip(0)
    kernels.recur.arrange(out, x_on, column_W.to(device))
    return max(worst, error(out, x.flip(1)))


_ONE_TOKEN = Steps(Steps.rows[:4])


def cases() -> Iterator[Case]:
    """Yield every case."""
    for dtype, bound in BOUNDS.items():
        name, needs_gpu = str(dtype).removeprefix("torch."), dtype == torch.bfloat16
        yield Case(f"states-gates-{name}", lambda k, d, t=dtype: gates(k, d, t), bound, needs_gpu)
        yield Case(f"states-convolve-{name}", lambda k, d, t=dtype: convolution(k, d, t, 4, Steps()), bound, needs_gpu)
        sizes = (1, 2, 20, 11)
        yield Case(f"states-rule-{name}", lambda k, d, t=dtype, s=sizes: rule(k, d, t, s, Steps()), bound, needs_gpu)
        yield Case(f"states-steps-{name}", lambda k, d, t=dtype: step_dependence(k, d, t), 0.0)
    f32 = torch.float32
    yield Case("states-convolve-two-taps", lambda k, d: convolution(k, d, f32, 2, _ONE_TOKEN), BOUNDS[f32])
    yield Case("states-rule-tiled", lambda k, d: rule(k, d, f32, (2, 6, 16, 8), _ONE_TOKEN, is_tiled=True), BOUNDS[f32])
    yield Case("states-rule-wide", lambda k, d: rule(k, d, f32, (1, 1, 200, 16), _ONE_TOKEN), BOUNDS[f32])
