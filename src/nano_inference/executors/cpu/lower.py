"""Lowers a decoder's program to the C kernels' operations, which are fused and work in place.

`Linear` and `Norm` absorb a following `Add`; one `Heads` replaces `HeadNorm`, `Rotate` and `Store` of a layer's
queries, keys and values. `Keep` moves before the last `Attend`, so that only queries of kept rows attend.

A buffer of a program becomes a range of columns of a kernel buffer; the outputs of one `Linear` share a kernel buffer.
Raises `ValueError` naming an operation that the kernels cannot compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cpu import program as kernel
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.models import ops
from nano_inference.models.ops import Number, Op, WeightSpec
from nano_inference.models.program import Program, live_after

_MOST_TAPS = 64  # c/delta.h


@dataclass(frozen=True, slots=True)
class CpuWeights:
    """Packed matrices, and float32 vectors and numbers, by weight name."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        matrices = sum(matrix.num_bytes for matrix in self.matrices.values())
        return matrices + sum(vector.nbytes for vector in self.vectors.values())

    def vector(self, specs: Sequence[WeightSpec]) -> Tensor | None:
        """Concatenate vectors; None if `specs` is empty."""
        found = [self.vectors[spec.name] for spec in specs]
        return torch.cat(found) if len(found) > 1 else found[0] if found else None


class Place(NamedTuple):
    """Location of a program's buffer: columns [start, start + width) of a kernel buffer."""

    buffer: str
    start: int
    width: int


Lowerings = Mapping[type[Any], Callable[[Any, Any], None]]
"""Maps an operation's class to the function that appends its kernel operations to a `Lowering`."""


@dataclass
class Lowering:
    """State while the operations of one part are lowered in order."""

    program: Program
    part: tuple[Op, ...]
    live: list[frozenset[str]]  # `live_after` of the part
    weights: CpuWeights
    lowerings: Lowerings
    places: dict[str, Place] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    ops: list[kernel.Op] = field(default_factory=list)
    index: int = 0  # of the operation that is lowered

    def place(self, names: Sequence[str], widths: Sequence[int], *, other_than: str = "") -> str:
        """Assign buffers to adjacent columns of one kernel buffer, not `other_than`; return its name."""
        buffer = "+".join(names)
        while buffer == other_than or self.widths.get(buffer, sum(widths)) != sum(widths):
            buffer += "'"
        self.widths[buffer] = sum(widths)
        start = 0
        for name, width in zip(names, widths, strict=True):
            self.places[name] = Place(buffer, start, width)
            start += width
        return buffer

    def first(self, op: Op, name: str) -> str:
        """Return the kernel buffer that starts with a buffer. Raises `ValueError` if the buffer starts later."""
        place = self.places[name]
        if place.start:
            raise ValueError(
                f"{type(op).__name__} of {name}: the CPU kernels read only the first output of a Linear here"
            )
        return place.buffer

    def whole(self, op: Op, name: str) -> str:
        """Return the kernel buffer that holds only this buffer. Raises `ValueError` if it holds others, too."""
        place = self.places[name]
        if place != Place(place.buffer, 0, self.widths[place.buffer]):
            raise ValueError(f"{type(op).__name__} of {name}: the CPU kernels need all outputs of a Linear here")
        return place.buffer

    def adjacent(self, op: Op, names: Sequence[str]) -> str:
        """Return the kernel buffer that starts with these buffers, side by side. Raises `ValueError` without one."""
        start, buffer = 0, self.places[names[0]].buffer
        for name in names:
            if self.places[name]._replace(width=0) != (buffer, start, 0):
                raise ValueError(f"{type(op).__name__}: the CPU kernels need {', '.join(names)} side by side")
            start += self.places[name].width
        return buffer

    def number(self, number: Number | None) -> Tensor | None:
        """Return a number as a tensor [1]."""
        if number is None:
            return None
        return self.weights.vectors[number.weight.name][number.index : number.index + 1]


def lowered(
    program: Program,
    part: Sequence[Op],
    weights: CpuWeights,
    given: Mapping[str, int],
    result: str,
    lowerings: Lowerings,
) -> kernel.Program:
    """Lower one part of a program; the result is in the kernel buffer named `result`.

    `given` maps the input buffers of a run to their widths.
    """
    state = Lowering(program, tuple(part), live_after(part, result), weights, lowerings)
    for name, width in given.items():
        state.place([name], [width])
    while state.index < len(part):
        state.index += _lower(state, state.index)
    if state.places[result] != Place(result, 0, state.widths[result]):
        raise ValueError(f"{result} must be written by one operation of its own")
    num_heads, num_kv_heads, head_dim = head_sizes(program)
    return kernel.Program(
        ops=tuple(state.ops), widths=state.widths, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


def head_sizes(program: Program) -> tuple[int, int, int]:
    """Return (query heads, kv heads, head size). Raises `ValueError` if layers differ in them."""
    sizes = {(op.num_heads, op.num_kv_heads, op.head_dim) for op in program.body if isinstance(op, ops.Attend)}
    if len(sizes) != 1:
        raise ValueError(f"Attend: the CPU kernels need layers with the same heads, not {sorted(sizes)}")
    return sizes.pop()


def _lower(state: Lowering, index: int) -> int:
    """Lower the operation at an index and those fused with it; return how many were lowered."""
    op, after = state.part[index], state.part[index + 1] if index + 1 < len(state.part) else None
    onto = None  # the buffer to which `after` adds the result of `op`, if that is the result's only use
    if isinstance(after, ops.Add) and len(op.writes) == 1:
        is_only_added = after.y == op.writes[0] and after.x == after.out != after.y
        onto = after.x if is_only_added and after.y not in state.live[index + 1] else None
    if isinstance(op, ops.Linear) and onto is not None and state.places[onto].buffer == state.places[op.x].buffer:
        onto = None  # a product cannot be added in place to its own input
    if isinstance(op, ops.Linear | ops.Norm):
        _linear_or_norm(state, op, onto)
        return 1 if onto is None else 2
    if isinstance(op, ops.HeadNorm | ops.Rotate | ops.Store):
        return _heads(state, state.part, index)
    if isinstance(op, ops.Attend):
        is_last = isinstance(after, ops.Keep)
        if is_last:
            _keep(state, state.live[index + 1] - {op.out} | {op.q})
        _attend(state, op)
        return 2 if is_last else 1
    if isinstance(op, ops.Keep):
        _keep(state, state.live[index])
    else:
        state.lowerings[type(op)](state, op)
    return 1


def _linear_or_norm(state: Lowering, op: ops.Linear | ops.Norm, onto: str | None) -> None:
    """Lower a projection or a norm; if `onto` is given, its result is added to that buffer."""
    weights, is_added = state.weights, onto is not None
    if isinstance(op, ops.Norm):
        x = state.whole(op, op.x)
        out = state.whole(op, onto) if onto else state.place([op.out], [state.places[op.x].width])
        weight = None if op.weight is None else weights.vectors[op.weight.name]
        state.ops.append(kernel.Norm(x=x, out=out, weight=weight, eps=op.eps, offset=op.offset, add=is_added))
        return
    x = state.first(op, op.x)
    widths = [spec.shape[0] for spec in op.matrices]  # with the padding that `num_rows` leaves out
    out = state.whole(op, onto) if onto else state.place(op.out, widths, other_than=x)
    matrices = tuple(weights.matrices[spec.name] for spec in op.matrices)
    state.ops.append(kernel.Product(x=x, out=out, matrices=matrices, bias=weights.vector(op.biases), add=is_added))


def _heads(state: Lowering, part: tuple[Op, ...], index: int) -> int:
    """Lower consecutive head norm, rotation and store as one operation; return how many were lowered."""
    taken: list[ops.HeadNorm | ops.Rotate | ops.Store] = []
    order = {ops.HeadNorm: 0, ops.Rotate: 1, ops.Store: 3}
    rank = -1
    for op in part[index:]:
        if not isinstance(op, ops.HeadNorm | ops.Rotate | ops.Store):
            break
        own = 2 if isinstance(op, ops.HeadNorm) and rank == 1 else order[type(op)]
        if own <= rank or (own == 2 and any(isinstance(one, ops.HeadNorm) for one in taken)):
            break
        taken.append(op)
        rank = own
    norm = next((op for op in taken if isinstance(op, ops.HeadNorm)), None)
    rotate = next((op for op in taken if isinstance(op, ops.Rotate)), None)
    store = next((op for op in taken if isinstance(op, ops.Store)), None)
    is_before = norm is not None and (rotate is None or taken.index(norm) < taken.index(rotate))
    weights = [state.weights.vectors[spec.name] for spec in norm.norms] if norm else []
    state.ops.append(
        kernel.Heads(
            x=_qkv(state, taken),
            layer=-1 if store is None else store.layer,
            rope=None if rotate is None else rotate.rope,
            norm="none" if norm is None else "before" if is_before else "after",
            q_weight=weights[0] if weights else None,
            k_weight=weights[1] if weights else None,
            eps=norm.eps if norm else 0.0,
            offset=norm.offset if norm else 0.0,
        )
    )
    return len(taken)


def _qkv(state: Lowering, taken: Sequence[ops.HeadNorm | ops.Rotate | ops.Store]) -> str:
    """Return the kernel buffer of queries, keys and values. Raises `ValueError` if they are not adjacent there."""
    num_heads, num_kv, dim = head_sizes(state.program)
    buffer = state.places[taken[0].reads[0]].buffer
    ends = {0: num_heads * dim, num_heads * dim: num_kv * dim, (num_heads + num_kv) * dim: num_kv * dim}
    for op in taken:
        found = [state.places[name] for name in op.reads]
        starts = list(ends)[1:] if isinstance(op, ops.Store) else list(ends)[:2]
        if [place.start for place in found] != starts or any(
            place.buffer != buffer or place.width != ends[place.start] for place in found
        ):
            raise ValueError(f"{type(op).__name__}: the CPU kernels need queries, keys and values of one Linear")
    return buffer


def _attend(state: Lowering, op: ops.Attend) -> None:
    x = state.first(op, op.q)
    out = state.place([op.out], [op.num_heads * op.head_dim], other_than=x)
    state.ops.append(kernel.Attend(x=x, out=out, layer=op.layer, scale=op.scale, window=op.window, softcap=op.softcap))


def _keep(state: Lowering, names: frozenset[str]) -> None:
    """Append operations that move the kept rows of buffers to the front, up to three kernel buffers each."""
    buffers = sorted({state.places[name].buffer for name in names if name in state.places})
    for start in range(0, len(buffers), 3):
        state.ops.append(kernel.Keep(buffers=tuple(buffers[start : start + 3])))


def _embed(state: Lowering, op: ops.Embed) -> None:
    out = state.place([op.out], [op.table.shape[1]])
    scale = float(torch.tensor(op.scale, dtype=torch.float32))
    table = state.weights.matrices[op.table.name]
    state.ops.append(kernel.Embed(out=out, table=table, rows=op.rows, scale=scale))


def _widen(state: Lowering, op: ops.Widen) -> None:
    if op.out != op.x:  # in place it is a no-op: all values are float32
        _mix(state, ops.Copy(x=op.x, out=op.out))


def _softcap(state: Lowering, op: ops.Softcap) -> None:
    state.ops.append(kernel.Softcap(x=state.whole(op, op.x), cap=op.cap))


def _gate_values(state: Lowering, op: ops.GateValues) -> None:
    num_heads, num_kv, dim = head_sizes(state.program)
    if state.places[op.v].start != (num_heads + num_kv) * dim:
        raise ValueError("GateValues: the CPU kernels need queries, keys and values of one Linear")
    gate, more = state.first(op, op.gate), state.first(op, op.more)
    state.ops.append(kernel.GateValues(x=state.places[op.v].buffer, gate=gate, more=more, scale=op.scale))


def _smear(state: Lowering, op: ops.Smear) -> None:
    x, gate, before = state.whole(op, op.x), state.first(op, op.gate), state.first(op, op.before)
    share = state.number(op.share)
    assert share is not None
    state.ops.append(kernel.Smear(x=x, gate=gate, before=before, weight=share))


def _mix(state: Lowering, op: ops.Copy | ops.Add | ops.Mix) -> None:
    x = state.first(op, op.x)
    y = x if isinstance(op, ops.Copy) else state.first(op, op.y)
    out = state.place([op.out], [state.places[op.x].width])
    a, b, scale = None, None, 0.0 if isinstance(op, ops.Copy) else 1.0
    if isinstance(op, ops.Mix):
        a, b, scale = state.number(op.a), state.number(op.b), float(op.sign)
    state.ops.append(kernel.Mix(x=x, y=y, out=out, a=a, b=b, scale=scale))


def _activate(state: Lowering, op: ops.Activate) -> None:
    x, width = state.first(op, op.gate), state.places[op.gate].width
    if op.up is not None and state.places[op.up] != (x, width, width):
        raise ValueError("Activate: the CPU kernels need gate and up side by side, from one Linear")
    out = state.place([op.out], [width], other_than=x)
    state.ops.append(kernel.Activate(x=x, out=out, kind=op.kind))


def _unzip(state: Lowering, op: ops.Unzip) -> None:
    """Lower to one copy. What follows x in its buffer follows the first output, as `Heads` needs keys and values."""
    x, group = state.places[op.x], sum(op.widths)
    after = [
        (place.start, place.width, name)
        for name, place in state.places.items()
        if place.buffer == x.buffer and place.start > x.start and name in state.live[state.index]
    ]
    after.sort()
    starts = accumulate(op.widths, initial=x.start)
    outs = [(start, width, name) for start, width, name in zip(starts, op.widths, op.out, strict=False)]
    unit = math.gcd(*(number for start, width, _ in (*outs, *after) for number in (start, width, group)))
    names: list[str] = []
    widths: list[int] = []
    pieces: list[int] = []
    for start, width, name in (outs[0], *after, *outs[1:]):
        is_out = name in op.out
        runs = range(start, x.start + x.width, group) if is_out else (start,)
        names.append(name)
        widths.append(width * len(runs))
        pieces += [column // unit for run in runs for column in range(run, run + width, unit)]
    out = state.place(names, widths, other_than=x.buffer)
    state.ops.append(kernel.Arrange(x=x.buffer, out=out, pieces=torch.tensor(pieces, dtype=torch.int32), dim=unit))


def _convolve(state: Lowering, op: ops.Convolve) -> None:
    channels, _, taps = op.weight.shape
    if taps > _MOST_TAPS:
        raise ValueError(f"Convolve: {op.weight.name} has {taps} taps; the CPU kernels have at most {_MOST_TAPS}")
    x = state.adjacent(op, op.x)
    out = state.place(op.out, op.widths, other_than=x)
    weight = state.weights.vectors[op.weight.name].view(channels, taps).t().contiguous()
    start = state.program.state_start(op.state)
    state.ops.append(kernel.Convolve(x=x, out=out, weight=weight, state=start))


def _gated_delta(state: Lowering, op: ops.GatedDelta) -> None:
    x, a, b = state.adjacent(op, (op.q, op.k, op.v)), state.places[op.a], state.places[op.b]
    if a.buffer != b.buffer:
        raise ValueError("GatedDelta: the CPU kernels need a and b of one Linear")
    read_later = ({*op.reads} - {op.out}) & state.live[state.index]
    if read_later:
        raise ValueError(f"GatedDelta: the CPU kernels overwrite {read_later.pop()}, which is read later")
    vectors = state.weights.vectors
    state.ops.append(
        kernel.Delta(
            x=x,
            more=a.buffer,
            a=a.start,
            b=b.start,
            out=state.place([op.out], [op.num_v_heads * op.v_dim], other_than=x),
            a_log=vectors[op.a_log.name],
            dt_bias=vectors[op.dt_bias.name],
            num_k_heads=op.num_k_heads,
            num_v_heads=op.num_v_heads,
            k_dim=op.k_dim,
            is_tiled=op.is_tiled,
            state=state.program.state_start(op.state),
        )
    )


def _gated(state: Lowering, op: ops.GatedNorm | ops.Gate) -> None:
    x, gate = state.whole(op, op.x), state.places[op.gate]
    out = state.place([op.out], [state.places[op.x].width], other_than=gate.buffer)
    if isinstance(op, ops.Gate):
        state.ops.append(kernel.Gate(x=x, more=gate.buffer, column=gate.start, out=out))
        return
    weight = state.weights.vectors[op.weight.name]
    state.ops.append(
        kernel.GatedNorm(
            x=x, more=gate.buffer, column=gate.start, out=out, weight=weight, eps=op.eps, head_dim=op.head_dim
        )
    )


LOWERINGS: Lowerings = {
    ops.Embed: _embed,
    ops.Copy: _mix,
    ops.Add: _mix,
    ops.Mix: _mix,
    ops.Activate: _activate,
    ops.GateValues: _gate_values,
    ops.Smear: _smear,
    ops.Unzip: _unzip,
    ops.Convolve: _convolve,
    ops.GatedDelta: _gated_delta,
    ops.GatedNorm: _gated,
    ops.Gate: _gated,
    ops.Widen: _widen,
    ops.Softcap: _softcap,
}
"""Operations that are never fused."""
_FUSED = (ops.Linear, ops.Norm, ops.HeadNorm, ops.Rotate, ops.Store, ops.Attend, ops.Keep)
"""Operations that `_lower` handles, because they may be fused with the next one."""


def check_operations(program: Program, lowerings: Lowerings) -> None:
    """Raise `ValueError` naming the operations of a program that the kernels do not support."""
    unknown = {type(op) for op in program.ops} - {*lowerings, *_FUSED}
    if unknown:
        names = ", ".join(sorted(one.__name__ for one in unknown))
        raise ValueError(f"the CPU kernels have no operation {names}; kernels=off computes this model with torch")
    head_sizes(program)
