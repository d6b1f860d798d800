"""A program's operations bound to weights: a list of functions that a step goes through.

What an operation writes is a new value, a tensor of a row a token; the outputs of one `Linear` are one value, and so
are queries and keys that are normalised and rotated together. A buffer is a range of columns of a value. Nothing is
changed in place, and a value is dropped behind its last use.

Shapes: T rows of the step (K of them behind `Keep`), W width of a buffer, Y heads, D head size, N and K of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.torch import ops as compute
from nano_inference.executors.torch.attention import AttentionSpec, StepContext
from nano_inference.executors.torch.weights import TorchWeights
from nano_inference.models import ops
from nano_inference.models.ops import Number, Op
from nano_inference.models.program import last_uses


@dataclass(slots=True)
class Step:
    """What one run knows: its values, and the step's context where the part has tokens."""

    values: list[Tensor | None]
    context: StepContext | None
    kept_K: Tensor | None
    """The rows that `Keep` leaves; None leaves all."""

    @property
    def tokens(self) -> StepContext:
        assert self.context is not None, "this part of a program has no tokens"
        return self.context


class _Columns(NamedTuple):
    """Where a buffer is: columns [start, start + width) of a value."""

    value: int
    start: int
    width: int


Read = Callable[[Step], Tensor]
Run = Callable[[Step], None]


@dataclass
class _Scope:
    """What is known of buffers while operations are bound, in order."""

    weights: TorchWeights
    places: dict[str, _Columns] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    """Width of every value."""

    def bind(self, names: Sequence[str], widths: Sequence[int]) -> int:
        """Make a value of buffers side by side; return its number."""
        number = len(self.widths)
        self.widths.append(sum(widths))
        for name, start, width in zip(names, accumulate(widths, initial=0), widths, strict=False):
            self.places[name] = _Columns(number, start, width)
        return number

    def width(self, name: str) -> int:
        return self.places[name].width

    def read(self, name: str) -> Read:
        """Return a function that gives a buffer, [T, W]."""
        at = self.places[name]
        return _slice_of(at, self.widths[at.value])

    def read_heads(self, names: Sequence[str], head_dim: int) -> Read:
        """Return a function that gives buffers as heads, [T, Y, D]: a view where they lie side by side."""
        found = [self.places[name] for name in names]
        first = found[0]
        ends = accumulate((one.width for one in found), initial=first.start)
        if all(one.value == first.value and one.start == end for one, end in zip(found, ends, strict=False)):
            whole = _Columns(first.value, first.start, sum(one.width for one in found))
            return _heads_of(whole, self.widths[first.value], head_dim)
        parts = [_heads_of(one, self.widths[one.value], head_dim) for one in found]
        return lambda step: torch.cat([part(step) for part in parts], dim=1)

    def number(self, number: Number | None) -> Tensor | None:
        """Return one entry as a tensor without dimensions, which does not widen what it is multiplied with."""
        return None if number is None else self.weights.tensors[number.weight.name][number.index]


def _value_of(step: Step, number: int) -> Tensor:
    value = step.values[number]
    assert value is not None
    return value


def _slice_of(at: _Columns, value_width: int) -> Read:
    if at.width == value_width:
        return lambda step: _flat(_value_of(step, at.value))
    end = at.start + at.width
    return lambda step: _flat(_value_of(step, at.value))[:, at.start : end]


def _flat(value: Tensor) -> Tensor:
    return value if value.dim() == 2 else value.flatten(1)


def _heads_of(at: _Columns, value_width: int, head_dim: int) -> Read:
    begin, end = at.start // head_dim, (at.start + at.width) // head_dim
    is_whole = at.width == value_width

    def read(step: Step) -> Tensor:
        value = _value_of(step, at.value)
        heads_TYD = value if value.dim() == 3 else value.reshape(value.size(0), -1, head_dim)
        return heads_TYD if is_whole else heads_TYD[:, begin:end]

    return read


class CompiledPart:
    """One part of a program over certain weights, ready to run on any device."""

    def __init__(self, part: Sequence[Op], weights: TorchWeights, given: Mapping[str, int], result: str) -> None:
        """`given` are the buffers that a run brings, with their widths; `result` is the one it returns."""
        scope = _Scope(weights)
        for name, width in given.items():
            scope.bind([name], [width])
        self._num_given = len(given)
        self._runs: list[Run] = []
        for op, dead in zip(part, last_uses(tuple(part), result), strict=True):
            ended = {scope.places[name].value for name in op.reads if name in scope.places}
            self._runs.append(_bound(op, scope))
            for name in dead:
                scope.places.pop(name, None)
            live = {place.value for place in scope.places.values()}
            if ended - live:
                self._runs.append(_dropping(tuple(ended - live)))
        self._result = scope.read(result)
        self._num_values = len(scope.widths)

    def run(self, given: Sequence[Tensor], context: StepContext | None = None, kept_K: Tensor | None = None) -> Tensor:
        """Go through the part; return its result, a row for every row of the step, or for those that are kept."""
        values = [*given, *[None] * (self._num_values - len(given))]
        step = Step(values, context, kept_K)
        for run in self._runs:
            run(step)
        return self._result(step)


def _dropping(numbers: tuple[int, ...]) -> Run:
    def drop(step: Step) -> None:
        for number in numbers:
            step.values[number] = None

    return drop


def _bound(op: Op, scope: _Scope) -> Run:
    """Return an operation as a function of the step; the scope learns what it writes."""
    if isinstance(op, ops.Keep):
        return _keep
    if isinstance(op, ops.Store):
        return _store(op, scope)
    if isinstance(op, ops.Copy):
        scope.places[op.out] = scope.places[op.x]
        return lambda step: None
    compute_value, names, widths = _computed(op, scope)
    number = scope.bind(names, widths)

    def run(step: Step) -> None:
        step.values[number] = compute_value(step)

    return run


def _keep(step: Step) -> None:
    if step.kept_K is not None:
        kept_K = step.kept_K
        step.values[:] = [None if value is None else value[kept_K] for value in step.values]


def _store(op: ops.Store, scope: _Scope) -> Run:
    k_of, v_of = (scope.read_heads([name], op.head_dim) for name in (op.k, op.v))

    def run(step: Step) -> None:
        tokens = step.tokens
        tokens.store.write(op.layer, tokens.step.slot_T, k_of(step), v_of(step))

    return run


_Computed = tuple[Read, Sequence[str], Sequence[int]]
"""What computes an operation's value, and the buffers in it with their widths."""


def _computed(op: Op, scope: _Scope) -> _Computed:
    """Bind an operation that writes a value of its own."""
    if isinstance(op, ops.Embed):
        return _embed(op, scope), [op.out], [op.table.shape[1]]
    if isinstance(op, ops.Norm):
        return _norm(op, scope), [op.out], [scope.width(op.x)]
    if isinstance(op, ops.Linear):
        return _linear(op, scope), op.out, op.widths
    if isinstance(op, ops.HeadNorm | ops.Rotate):
        read = _head_norm(op, scope) if isinstance(op, ops.HeadNorm) else _rotate(op, scope)
        return read, op.x, [scope.width(name) for name in op.x]
    if isinstance(op, ops.Attend):
        return _attend(op, scope), [op.out], [op.num_heads * op.head_dim]
    if isinstance(op, ops.GateValues):
        return _gate_values(op, scope), [op.v], [scope.width(op.v)]
    return _small(op, scope)


def _small(op: Op, scope: _Scope) -> _Computed:
    """Bind an operation that treats each value of a row by itself."""
    if isinstance(op, ops.Add):
        x, y = scope.read(op.x), scope.read(op.y)
        return lambda step: x(step) + y(step), [op.out], [scope.width(op.x)]
    if isinstance(op, ops.Mix):
        return _mix(op, scope), [op.out], [scope.width(op.x)]
    if isinstance(op, ops.Activate):
        return _activate(op, scope), [op.out], [scope.width(op.gate)]
    if isinstance(op, ops.Smear):
        return _smear(op, scope), [op.x], [scope.width(op.x)]
    if isinstance(op, ops.Widen):
        x = scope.read(op.x)
        return lambda step: x(step).float(), [op.out], [scope.width(op.x)]
    assert isinstance(op, ops.Softcap), f"{type(op).__name__}: torch has no such operation"
    x, cap = scope.read(op.x), op.cap
    return lambda step: compute.softcap(x(step), cap), [op.x], [scope.width(op.x)]


def _embed(op: ops.Embed, scope: _Scope) -> Read:
    table = scope.weights.tensors[op.table.name]
    scale = None if op.scale == 1.0 else torch.tensor(op.scale, dtype=table.dtype)

    def run(step: Step) -> Tensor:
        tokens = step.tokens.step
        return compute.embed(table, tokens.token_T, tokens.prev_T, op.rows, scale)

    return run


def _norm(op: ops.Norm, scope: _Scope) -> Read:
    x, weight = scope.read(op.x), None if op.weight is None else scope.weights.tensors[op.weight.name]
    return lambda step: compute.rms_norm(x(step), weight, op.eps, op.offset)


def _linear(op: ops.Linear, scope: _Scope) -> Read:
    x, num_in = scope.read(op.x), op.matrices[0].shape[1]
    weight = scope.weights.stacked(op.matrices)[: op.num_rows]
    bias = scope.weights.stacked(op.biases) if op.biases else None
    if num_in < scope.width(op.x):
        return lambda step: compute.linear(x(step)[:, :num_in], weight, bias)
    return lambda step: compute.linear(x(step), weight, bias)


def _head_norm(op: ops.HeadNorm, scope: _Scope) -> Read:
    if not op.norms:
        x = scope.read_heads(op.x, op.head_dim)
        return lambda step: compute.rms_norm(x(step), None, op.eps, op.offset)
    weights = [scope.weights.tensors[norm.name] for norm in op.norms]
    each = [scope.read_heads([name], op.head_dim) for name in op.x]

    def run(step: Step) -> Tensor:
        normed = [compute.rms_norm(x(step), weight, op.eps, op.offset) for x, weight in zip(each, weights, strict=True)]
        return torch.cat(normed, dim=1) if len(normed) > 1 else normed[0]

    return run


def _rotate(op: ops.Rotate, scope: _Scope) -> Read:
    x = scope.read_heads(op.x, op.head_dim)
    return lambda step: compute.rotate(x(step), *step.tokens.ropes[op.rope])


def _attend(op: ops.Attend, scope: _Scope) -> Read:
    q, k, v = (scope.read_heads([name], op.head_dim) for name in (op.q, op.k, op.v))
    spec = AttentionSpec(op.scale, op.window, op.softcap)

    def run(step: Step) -> Tensor:
        tokens = step.tokens
        plan = tokens.plans[op.window]
        return tokens.backend.attend(q(step), k(step), v(step), tokens.store, op.layer, spec, plan).flatten(1)

    return run


def _mix(op: ops.Mix, scope: _Scope) -> Read:
    x, y, a, b = scope.read(op.x), scope.read(op.y), scope.number(op.a), scope.number(op.b)
    assert b is not None
    factor = b if op.sign > 0 else -b
    if a is None:
        return lambda step: x(step) + factor * y(step)
    return lambda step: a * x(step) + factor * y(step)


def _activate(op: ops.Activate, scope: _Scope) -> Read:
    gate = scope.read(op.gate)
    up = None if op.up is None else scope.read(op.up)
    return lambda step: compute.activate(op.kind, gate(step), None if up is None else up(step))


def _gate_values(op: ops.GateValues, scope: _Scope) -> Read:
    v, gate, more = scope.read_heads([op.v], op.head_dim), scope.read(op.gate), scope.read(op.more)
    return lambda step: compute.gate_values(v(step), gate(step), more(step), op.scale)


def _smear(op: ops.Smear, scope: _Scope) -> Read:
    x, gate, before, share = scope.read(op.x), scope.read(op.gate), scope.read(op.before), scope.number(op.share)
    assert share is not None
    return lambda step: compute.smear(x(step), gate(step), before(step), share, step.tokens.step.prev_T)
