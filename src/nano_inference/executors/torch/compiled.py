"""Compiles a program's operations, with weights, to a list of Python functions.

Each operation creates a new value (a tensor with one row per token); nothing is changed in place, and a value is
dropped after its last use. A buffer is a range of columns of a value: the outputs of one `Linear` share one value, as
do queries and keys that are normalised or rotated together.

Shapes: T tokens of the step (K after `Keep`), W width of a buffer, Y heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.torch import ops as compute
from nano_inference.executors.torch import states
from nano_inference.executors.torch.adapters import Group, add_adapters
from nano_inference.executors.torch.attention import AttentionSpec, StepContext
from nano_inference.executors.torch.weights import TorchWeights
from nano_inference.models import ops
from nano_inference.models.ops import Number, Op
from nano_inference.models.program import live_after


@dataclass(slots=True)
class Step:
    """State of one run of a part."""

    values: list[Tensor | None]
    context: StepContext | None  # None for parts that read neither tokens nor the cache
    kept_K: Tensor | None  # rows selected by `Keep`; None selects all
    adapters: Sequence[Group]
    kept_adapters: Sequence[Group]  # those of the rows selected by `Keep`

    @property
    def tokens(self) -> StepContext:
        assert self.context is not None, "this part of a program has no tokens"
        return self.context

    def state(self, index: int) -> tuple[Tensor, states.StatePlan]:
        """Return the memory [Z, *shape] of a recurrent state, and the slots that the rows use."""
        plan, memory = self.tokens.states, self.tokens.store.states
        assert plan is not None and memory is not None, "the rows have no slots"
        return memory.views[index], plan


class Columns(NamedTuple):
    """Location of a buffer: columns [start, start + width) of a value."""

    value: int
    start: int
    width: int


Read = Callable[[Step], Tensor]
Run = Callable[[Step], None]


class Value(NamedTuple):
    """A tensor that an operation computes, and the buffers in its columns, in order."""

    compute: Read
    names: tuple[str, ...]
    widths: tuple[int, ...]


@dataclass
class Scope:
    """Locations of buffers while operations are bound, in order."""

    weights: TorchWeights
    places: dict[str, Columns] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)  # width of every value

    def place(self, names: Sequence[str], widths: Sequence[int]) -> int:
        """Add a value with buffers in adjacent columns; return its number."""
        number = len(self.widths)
        self.widths.append(sum(widths))
        for name, start, width in zip(names, accumulate(widths, initial=0), widths, strict=False):
            self.places[name] = Columns(number, start, width)
        return number

    def width(self, name: str) -> int:
        return self.places[name].width

    def like(self, x: str, out: str, compute: Read) -> Value:
        """Return the value of an operation whose output `out` is as wide as buffer `x`."""
        return Value(compute, (out,), (self.width(x),))

    def read(self, name: str) -> Read:
        """Return a function that returns a buffer [T, W]."""
        at = self.places[name]
        if at.width == self.widths[at.value]:
            return lambda step: _flat(_value_of(step, at.value))
        end = at.start + at.width
        return lambda step: _flat(_value_of(step, at.value))[:, at.start : end]

    def read_heads(self, names: Sequence[str], head_dim: int) -> Read:
        """Return a function that returns buffers as heads [T, Y, D]; a view if they are adjacent."""
        found = [self.places[name] for name in names]
        first = found[0]
        ends = accumulate((one.width for one in found), initial=first.start)
        if all(one.value == first.value and one.start == end for one, end in zip(found, ends, strict=False)):
            whole = Columns(first.value, first.start, sum(one.width for one in found))
            return _heads_of(whole, self.widths[first.value], head_dim)
        parts = [_heads_of(one, self.widths[one.value], head_dim) for one in found]
        return lambda step: torch.cat([part(step) for part in parts], dim=1)

    def number(self, number: Number | None) -> Tensor | None:
        """Return a number as a 0-d tensor, which does not promote the dtype of a product."""
        return None if number is None else self.weights.tensors[number.weight.name][number.index]


def _value_of(step: Step, number: int) -> Tensor:
    value = step.values[number]
    assert value is not None
    return value


def _flat(value: Tensor) -> Tensor:
    return value if value.dim() == 2 else value.flatten(1)


def _heads_of(at: Columns, value_width: int, head_dim: int) -> Read:
    begin, end = at.start // head_dim, (at.start + at.width) // head_dim
    is_whole = at.width == value_width

    def read(step: Step) -> Tensor:
        value = _value_of(step, at.value)
        heads_TYD = value if value.dim() == 3 else value.reshape(value.size(0), -1, head_dim)
        return heads_TYD if is_whole else heads_TYD[:, begin:end]

    return read


Operations = Mapping[type[Any], Callable[[Any, Scope], Value]]
"""Maps an operation's class to the function that binds it to a scope's weights and buffers."""


class CompiledPart:
    """One part of a program, bound to weights; runs on the device of the weights."""

    def __init__(
        self,
        part: Sequence[Op],
        weights: TorchWeights,
        given: Mapping[str, int],
        result: str,
        operations: Operations,
    ) -> None:
        """Bind all operations. `given` maps input buffers to widths; `result` names the buffer that `run` returns."""
        scope = Scope(weights)
        for name, width in given.items():
            scope.place([name], [width])
        self._num_given = len(given)
        self._runs: list[Run] = []
        for op, live in zip(part, live_after(part, result), strict=True):
            read = {scope.places[name].value for name in op.reads}
            self._runs.append(_bound(op, scope, operations))
            scope.places = {name: place for name, place in scope.places.items() if name in live}
            dead = read - {place.value for place in scope.places.values()}
            if dead:
                self._runs.append(_dropping(tuple(dead)))
        self._result = scope.read(result)
        self._num_values = len(scope.widths)

    def run(
        self,
        given: Sequence[Tensor],
        context: StepContext | None = None,
        kept_K: Tensor | None = None,
        adapters: Sequence[Group] = (),
        kept_adapters: Sequence[Group] = (),
    ) -> Tensor:
        """Run all operations on the `given` buffers; return the result, [T, W] or [K, W] after `Keep`."""
        values = [*given, *[None] * (self._num_values - len(given))]
        step = Step(values, context, kept_K, adapters, kept_adapters)
        for run in self._runs:
            run(step)
        return self._result(step)


def _dropping(numbers: tuple[int, ...]) -> Run:
    def drop(step: Step) -> None:
        for number in numbers:
            step.values[number] = None

    return drop


def _bound(op: Op, scope: Scope, operations: Operations) -> Run:
    """Return an operation as a function of the step, and add its outputs to the scope."""
    if isinstance(op, ops.Keep):
        return _keep
    if isinstance(op, ops.Store):
        return _store(op, scope)
    if isinstance(op, ops.Copy):
        scope.places[op.out] = scope.places[op.x]
        return lambda step: None
    value = operations[type(op)](op, scope)
    number = scope.place(value.names, value.widths)

    def run(step: Step) -> None:
        step.values[number] = value.compute(step)

    return run


def _keep(step: Step) -> None:
    step.adapters = step.kept_adapters
    if step.kept_K is not None:
        kept_K = step.kept_K
        step.values[:] = [None if value is None else value[kept_K] for value in step.values]


def _store(op: ops.Store, scope: Scope) -> Run:
    k_of, v_of = (scope.read_heads([name], op.head_dim) for name in (op.k, op.v))

    def run(step: Step) -> None:
        tokens = step.tokens
        tokens.store.write(op.layer, tokens.step.slot_T, k_of(step), v_of(step))

    return run


def _embed(op: ops.Embed, scope: Scope) -> Value:
    table = scope.weights.tensors[op.table.name]
    scale = None if op.scale == 1.0 else torch.tensor(op.scale, dtype=table.dtype)

    def run(step: Step) -> Tensor:
        tokens = step.tokens.step
        return compute.embed(table, tokens.token_T, tokens.prev_T, op.rows, scale, op.part)

    return Value(run, op.writes, (op.table.shape[1],))


def _norm(op: ops.Norm, scope: Scope) -> Value:
    x, weight = scope.read(op.x), None if op.weight is None else scope.weights.tensors[op.weight.name]
    return scope.like(op.x, op.out, lambda step: compute.rms_norm(x(step), weight, op.eps, op.offset))


def _linear(op: ops.Linear, scope: Scope) -> Value:
    x, num_in = scope.read(op.x), op.matrices[0].shape[1]
    weight = scope.weights.stacked(op.matrices)[: op.num_rows]
    bias = scope.weights.stacked(op.biases) if op.biases else None
    is_cut = num_in < scope.width(op.x)

    def run(step: Step) -> Tensor:
        x_TK = x(step)[:, :num_in] if is_cut else x(step)
        out_TN = compute.linear(x_TK, weight, bias)
        if step.adapters:
            add_adapters(out_TN, x_TK, op, step.adapters)
        return out_TN

    return Value(run, op.out, op.widths)


def _head_norm(op: ops.HeadNorm, scope: Scope) -> Value:
    widths = tuple(scope.width(name) for name in op.x)
    if not op.norms:
        x = scope.read_heads(op.x, op.head_dim)
        return Value(lambda step: compute.rms_norm(x(step), None, op.eps, op.offset), op.x, widths)
    weights = [scope.weights.tensors[norm.name] for norm in op.norms]
    each = [scope.read_heads([name], op.head_dim) for name in op.x]

    def run(step: Step) -> Tensor:
        normed = [compute.rms_norm(x(step), weight, op.eps, op.offset) for x, weight in zip(each, weights, strict=True)]
        return torch.cat(normed, dim=1) if len(normed) > 1 else normed[0]

    return Value(run, op.x, widths)


def _rotate(op: ops.Rotate, scope: Scope) -> Value:
    x, widths = scope.read_heads(op.x, op.head_dim), tuple(scope.width(name) for name in op.x)
    return Value(lambda step: compute.rotate(x(step), *step.tokens.ropes[op.rope]), op.x, widths)


def _attend(op: ops.Attend, scope: Scope) -> Value:
    q, k, v = (scope.read_heads([name], op.head_dim) for name in (op.q, op.k, op.v))
    spec = AttentionSpec(op.scale, op.window, op.softcap)

    def run(step: Step) -> Tensor:
        tokens = step.tokens
        plan = tokens.plans[op.window]
        return tokens.backend.attend(q(step), k(step), v(step), tokens.store, op.layer, spec, plan).flatten(1)

    return Value(run, op.writes, (op.num_heads * op.head_dim,))


def _mix(op: ops.Mix, scope: Scope) -> Value:
    x, y, a, b = scope.read(op.x), scope.read(op.y), scope.number(op.a), scope.number(op.b)
    assert b is not None

    def run(step: Step) -> Tensor:
        x_TW, y_TW = x(step) if a is None else a * x(step), b * y(step)
        return x_TW + y_TW if op.sign > 0 else x_TW - y_TW

    return scope.like(op.x, op.out, run)


def _activate(op: ops.Activate, scope: Scope) -> Value:
    gate = scope.read(op.gate)
    up = None if op.up is None else scope.read(op.up)

    def run(step: Step) -> Tensor:
        return compute.activate(op.kind, gate(step), None if up is None else up(step))

    return scope.like(op.gate, op.out, run)


def _gate_values(op: ops.GateValues, scope: Scope) -> Value:
    v, gate, more = scope.read_heads([op.v], op.head_dim), scope.read(op.gate), scope.read(op.more)
    return scope.like(op.v, op.v, lambda step: compute.gate_values(v(step), gate(step), more(step), op.scale))


def _smear(op: ops.Smear, scope: Scope) -> Value:
    x, gate, before, share = scope.read(op.x), scope.read(op.gate), scope.read(op.before), scope.number(op.share)
    assert share is not None

    def run(step: Step) -> Tensor:
        return compute.smear(x(step), gate(step), before(step), share, step.tokens.step.prev_T)

    return scope.like(op.x, op.x, run)


def _add(op: ops.Add, scope: Scope) -> Value:
    x, y = scope.read(op.x), scope.read(op.y)
    return scope.like(op.x, op.out, lambda step: x(step) + y(step))


def _heads(scope: Scope, name: str, head_dim: int) -> Read:
    """Return a function that returns a buffer as heads [T, Y, D]; others of its value may have another size."""
    x = scope.read(name)
    return lambda step: compute.heads(x(step), head_dim)


def _unzip(op: ops.Unzip, scope: Scope) -> Value:
    x, num_groups = _heads(scope, op.x, sum(op.widths)), scope.width(op.x) // sum(op.widths)

    def run(step: Step) -> Tensor:
        return torch.cat([part.flatten(1) for part in torch.split(x(step), list(op.widths), dim=2)], dim=1)

    return Value(run, op.out, tuple(num_groups * width for width in op.widths))


def _convolve(op: ops.Convolve, scope: Scope) -> Value:
    each, weight_CK = [scope.read(name) for name in op.x], scope.weights.tensors[op.weight.name].squeeze(1)

    def run(step: Step) -> Tensor:
        state_ZJC, plan = step.state(op.state)
        x_TC = torch.cat([x(step) for x in each], dim=1) if len(each) > 1 else each[0](step)
        return states.convolve(x_TC, weight_CK, state_ZJC, plan)

    return Value(run, op.out, op.widths)


def _gated_delta(op: ops.GatedDelta, scope: Scope) -> Value:
    q, k, v, a, b = (scope.read(name) for name in op.reads)
    numbers = [scope.weights.tensors[spec.name] for spec in (op.a_log, op.dt_bias)]

    def run(step: Step) -> Tensor:
        state_ZHXV, plan = step.state(op.state)
        q_THX, k_THX, g_TH, beta_TH = compute.delta_inputs(op, q(step), k(step), a(step), b(step), *numbers)
        v_THV = compute.heads(v(step), op.v_dim)
        out = states.gated_delta(q_THX, k_THX, v_THV.float(), g_TH, beta_TH, state_ZHXV, plan)
        return out.to(v_THV.dtype).flatten(1)

    return Value(run, op.writes, (op.num_v_heads * op.v_dim,))


def _gated_norm(op: ops.GatedNorm, scope: Scope) -> Value:
    x, gate = (_heads(scope, name, op.head_dim) for name in (op.x, op.gate))
    weight = scope.weights.tensors[op.weight.name]
    return scope.like(op.x, op.out, lambda step: compute.gated_norm(x(step), gate(step), weight, op.eps).flatten(1))


def _gate(op: ops.Gate, scope: Scope) -> Value:
    x, gate = scope.read(op.x), scope.read(op.gate)
    return scope.like(op.x, op.out, lambda step: x(step) * gate(step).sigmoid())


def _widen(op: ops.Widen, scope: Scope) -> Value:
    x = scope.read(op.x)
    return scope.like(op.x, op.out, lambda step: x(step).float())


def _softcap(op: ops.Softcap, scope: Scope) -> Value:
    x = scope.read(op.x)
    return scope.like(op.x, op.x, lambda step: compute.softcap(x(step), op.cap))


OPERATIONS: Operations = {
    ops.Embed: _embed,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.HeadNorm: _head_norm,
    ops.Rotate: _rotate,
    ops.Attend: _attend,
    ops.Add: _add,
    ops.Mix: _mix,
    ops.Activate: _activate,
    ops.GateValues: _gate_values,
    ops.Smear: _smear,
    ops.Unzip: _unzip,
    ops.Convolve: _convolve,
    ops.GatedDelta: _gated_delta,
    ops.GatedNorm: _gated_norm,
    ops.Gate: _gate,
    ops.Widen: _widen,
    ops.Softcap: _softcap,
}
"""Operations that compute a value; `_bound` handles `Store`, `Keep` and `Copy`."""
