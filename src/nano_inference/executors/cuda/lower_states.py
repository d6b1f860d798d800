"""Lowers the operations of layers with recurrent states, and of gated heads, to kernel launches (see `lower`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from nano_inference.executors.cuda.checks import check_key_size, check_taps
from nano_inference.executors.cuda.passes import Pass
from nano_inference.executors.cuda.registers import Columns, Lowering
from nano_inference.models import ops
from nano_inference.models.ops import Op


def _unzip(state: Lowering, op: ops.Unzip, live: frozenset[str]) -> None:
    """Lower to one copy. What follows x in its register follows the first output, as `Store` needs keys and values."""
    machine, x, group = state.machine, state.places[op.x], sum(op.widths)
    after = [
        (at.start, at.width, name)
        for name, at in state.places.items()
        if at.register == x.register and at.start > x.start and name in live
    ]
    starts = accumulate(op.widths, initial=x.start)
    outs = [(start, width, name) for start, width, name in zip(starts, op.widths, op.out, strict=False)]
    names: list[str] = []
    widths: list[int] = []
    columns: list[int] = []
    for start, width, name in (outs[0], *sorted(after), *outs[1:]):
        runs = range(start, x.start + x.width, group) if name in op.out else (start,)
        names.append(name)
        widths.append(width * len(runs))
        columns += [column for run in runs for column in range(run, run + width)]
    column_W = torch.tensor(columns, dtype=torch.int32).to(machine.one_1.device)
    out = state.place(names, widths)

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        machine.kernels.recur.arrange(registers.rows(out, n), registers.rows(x.register, n), column_W)

    state.launches.append(run)


def _adjacent(state: Lowering, op: Op, names: Sequence[str]) -> Columns:
    """Return buffers as one. Raises `ValueError` if they are not side by side."""
    found = [state.places[name] for name in names]
    first, width = found[0], sum(one.width for one in found)
    starts = accumulate((one.width for one in found), initial=first.start)
    if any(one.register != first.register or one.start != start for one, start in zip(found, starts, strict=False)):
        raise ValueError(f"{type(op).__name__}: the CUDA kernels need {', '.join(names)} side by side")
    return Columns(first.register, first.start, width)


def _convolve(state: Lowering, op: ops.Convolve, live: frozenset[str]) -> None:
    machine, x = state.machine, _adjacent(state, op, op.x)
    check_taps(op.weight.shape[2])
    weight_C1K = machine.weights.tensors[op.weight.name]
    out = state.place(op.out, op.widths)

    def run(step: Pass | None, n: int) -> None:
        assert step is not None and step.states is not None, "the rows have no slots"
        machine.kernels.recur.convolve(
            *(machine.registers.rows(out, n), machine.registers.read(x, n), weight_C1K),
            *(step.state(op.state), step.states, step.position_T),
            most_tokens=step.most_tokens,
        )

    state.launches.append(run)


def _gated_delta(state: Lowering, op: ops.GatedDelta, live: frozenset[str]) -> None:
    machine, qkv = state.machine, _adjacent(state, op, (op.q, op.k, op.v))
    check_key_size(op.k_dim)
    a, b = state.places[op.a], state.places[op.b]
    a_log_H, dt_bias_H = (machine.weights.tensors[spec.name] for spec in (op.a_log, op.dt_bias))
    out = state.place([op.out], [op.num_v_heads * op.v_dim])

    def run(step: Pass | None, n: int) -> None:
        assert step is not None and step.states is not None, "the rows have no slots"
        qkv_TW, a_TH, b_TH = (machine.registers.read(one, n) for one in (qkv, a, b))
        machine.kernels.recur.gated_delta(
            *(machine.registers.rows(out, n), qkv_TW, a_TH, b_TH, a_log_H, dt_bias_H),
            *(step.state(op.state), step.states, step.position_T),
            is_tiled=op.is_tiled,
        )

    state.launches.append(run)


def _gated_norm(state: Lowering, op: ops.GatedNorm, live: frozenset[str]) -> None:
    machine, x, gate = state.machine, state.places[op.x], state.places[op.gate]
    weight_V = machine.weights.tensors[op.weight.name]
    out = state.place([op.out], [x.width])

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        x_TW, gate_TW = registers.read(x, n), registers.read(gate, n)
        machine.kernels.recur.gated_norm(registers.rows(out, n), x_TW, gate_TW, weight_V, op.eps)

    state.launches.append(run)


def _gate(state: Lowering, op: ops.Gate, live: frozenset[str]) -> None:
    machine, x, gate = state.machine, state.places[op.x], state.places[op.gate]
    out = state.place([op.out], [x.width])

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        machine.kernels.recur.gate(registers.rows(out, n), registers.read(x, n), registers.read(gate, n))

    state.launches.append(run)


STATE_LOWERINGS: Mapping[type[Op], Callable[..., None]] = {
    ops.Unzip: _unzip,
    ops.Convolve: _convolve,
    ops.GatedDelta: _gated_delta,
    ops.GatedNorm: _gated_norm,
    ops.Gate: _gate,
}
