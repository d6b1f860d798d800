"""Lowers a program to a list of kernel launches on registers, fused where the kernels allow it.

`Norm` absorbs the `Add` before it; one launch replaces `HeadNorm`, `Rotate` and `Store` of a layer. `fusions` has those
of few tokens.

Raises `ValueError` naming an operation that the kernels cannot compute.

Shapes: T tokens of a pass, N outputs and K inputs of a matrix, or K ranks, W width of a buffer, F rotary size / 2,
L positions, H heads, D head size, V ids of a rank's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nano_inference.executors.cuda.fusions import chain_size, fuse
from nano_inference.executors.cuda.lower_states import STATE_LOWERINGS
from nano_inference.executors.cuda.passes import Pass
from nano_inference.executors.cuda.records import MOST_ROWS, MOST_SPLIT_ROWS, HeadNorms, num_sums
from nano_inference.executors.cuda.registers import Columns, Heads, Lowered, Lowering, Machine, StoredHeads
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.models import ops
from nano_inference.models.ops import Op
from nano_inference.models.program import live_after


def lower(
    machine: Machine,
    part: Sequence[Op],
    num_rows: int,
    given: Mapping[str, Columns],
    result: str,
    reusable: Sequence[int] = (),
) -> Lowered:
    """Lower one part of a program, for passes of up to `num_rows` rows.

    `given` locates its inputs, whose registers are not reused; `reusable` registers of other parts are.
    """
    live = live_after(part, result)
    state = Lowering(machine, part, num_rows, live, dict(given), owned=list(reusable), free=list(reusable))
    index = 0
    while index < len(part):
        start, size = index, chain_size(state, index)
        before, num_launches = dict(state.places), len(state.launches)
        while index < start + size:
            index += _lower(state, index)
        if size > 1:
            fuse(state, start, size, before, num_launches)
        state.release(state.live[index - 1] | given.keys())
    if state.heads is not None:
        raise ValueError("HeadNorm and Rotate: the CUDA kernels need a Store of the same keys behind them")
    keep_after = len(state.launches) if state.keep_after is None else state.keep_after
    result_at = state.places[result]
    return Lowered(tuple(state.launches), keep_after, state.kept, result_at, state.softcap, tuple(state.owned))


def _of(step: Pass | None) -> Pass:
    assert step is not None, "this part of a program has no tokens"
    return step


def _lower(state: Lowering, index: int) -> int:
    """Lower the operation at an index and those fused with it; return how many were lowered."""
    op, after = state.part[index], state.part[index + 1] if index + 1 < len(state.part) else None
    if state.is_wide and not isinstance(op, ops.Softcap):
        raise ValueError(f"{type(op).__name__} after Widen: the CUDA kernels support only Softcap there")
    if isinstance(op, ops.Add) and isinstance(after, ops.Norm) and after.x == op.out:
        _add_norm(state, op, after)
        return 2
    if type(op) not in _LOWERINGS:
        raise ValueError(f"the CUDA kernels have no operation {type(op).__name__}")
    _LOWERINGS[type(op)](state, op, state.live[index])
    return 1


def _embed(state: Lowering, op: ops.Embed, live: frozenset[str]) -> None:
    machine = state.machine
    table_VW = machine.weights.tensors[op.table.name]
    out = state.place([op.out], [op.table.shape[1]])

    def run(step: Pass | None, n: int) -> None:
        tokens = _of(step).token_T.narrow(0, 0, n), _of(step).previous_T.narrow(0, 0, n)
        machine.kernels.operate.embed(machine.registers.rows(out, n), table_VW, *tokens, op.rows, op.scale, op.part)

    state.launches.append(run)


def _copy(state: Lowering, op: ops.Copy | ops.Widen, live: frozenset[str]) -> None:
    state.places[op.out] = state.places[op.x]
    state.is_wide |= isinstance(op, ops.Widen)


def _norm(state: Lowering, op: ops.Norm, live: frozenset[str]) -> None:
    machine, x = state.machine, state.places[op.x]
    weight = None if op.weight is None else machine.weights.tensors[op.weight.name]
    out = state.place([op.out], [x.width])

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        machine.kernels.operate.norm(registers.rows(out, n), registers.read(x, n), weight, eps=op.eps, offset=op.offset)

    state.launches.append(run)


def _add_norm(state: Lowering, add: ops.Add, op: ops.Norm) -> None:
    machine, x, y = state.machine, state.places[add.x], state.places[add.y]
    weight = None if op.weight is None else machine.weights.tensors[op.weight.name]
    total = state.place([add.out], [x.width])
    out = state.place([op.out], [x.width])

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        machine.kernels.operate.norm(
            *(registers.rows(out, n), registers.read(x, n), weight),
            eps=op.eps,
            offset=op.offset,
            more_TW=registers.read(y, n),
            sum_TW=registers.rows(total, n),
        )

    state.launches.append(run)


def _linear(state: Lowering, op: ops.Linear, live: frozenset[str]) -> None:
    machine, num_in = state.machine, op.matrices[0].shape[1]
    x = state.places[op.x]._replace(width=num_in)
    weight_NK, bias_N = state.matrix(op)
    out = state.place(op.out, op.widths)
    is_adapted = machine.adapters.has(op)

    def run(step: Pass | None, n: int) -> None:
        out_TN, x_TK = machine.registers.rows(out, n), machine.registers.read(x, n)
        multiply(machine, out_TN, x_TK, weight_NK, bias_N)
        if is_adapted and step is not None and step.adapter_T is not None:
            adapter_T = step.adapter_T.narrow(0, 0, n)
            machine.kernels.adapt.add_adapters(out_TN, x_TK, machine.adapters.of(op), adapter_T)

    state.launches.append(run)


def multiply(machine: Machine, out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> None:
    """Write x Wᵀ + bias: few rows, and all rows of a deterministic machine, with `multiply`, others with cuBLAS."""
    if x_TK.size(0) <= MOST_ROWS or machine.is_deterministic:
        machine.kernels.multiply.multiply(out_TN, x_TK, weight_NK, bias_N, machine.ranges)
    elif bias_N is None:
        torch.mm(x_TK, weight_NK.t(), out=out_TN)
    else:
        torch.addmm(bias_N, x_TK, weight_NK.t(), out=out_TN)


def _reduce(state: Lowering, op: ops.Reduce, live: frozenset[str]) -> None:
    """Lower a sum over the ranks. A deterministic one has an order of its own, which a library chooses by the size."""
    machine, x, ranks = state.machine, state.whole(op, op.x), state.machine.ranks
    assert ranks is not None, "only a rank's program has Reduce"

    def run(step: Pass | None, n: int) -> None:
        x_TW = machine.registers.rows(x, n)
        if not machine.is_deterministic:
            ranks.ranks.exchange.add_in_place(x_TW)
            return
        total_TW, *others = ranks.gathered(x_TW).unbind(0)
        for other_TW in others:
            machine.kernels.operate.mix(x_TW, total_TW, other_TW, None, machine.one_1, 1)
            total_TW = x_TW

    state.launches.append(run)


def gather_logits(machine: Machine, part: Lowered, out: int, vocab_size: int) -> Lowered:
    """Return a part with the logits of all ids in register `out`, of one that computes this rank's."""
    ranks, own, registers = machine.ranks, part.result, machine.registers
    assert ranks is not None
    shape = (ranks.ranks.exchange.size, ranks.ranks.part_size)

    def run(step: Pass | None, n: int) -> None:
        found_KTV = ranks.gathered(ranks.padded(registers.read(own, n)))
        registers.rows(out, n).view(n, *shape).copy_(found_KTV.transpose(0, 1))

    return replace(part, launches=(*part.launches, run), result=Columns(out, 0, vocab_size))


def part_size(part: Sequence[Op], *, is_deterministic: bool) -> int:
    """Return how many values of scratch memory `multiply` needs for a part of a program."""
    most = MOST_SPLIT_ROWS if is_deterministic else MOST_ROWS
    linears = (op for op in part if isinstance(op, ops.Linear))
    return max((num_sums(most, sum(op.widths), op.matrices[0].shape[1]) for op in linears), default=0)


def _head_norm(state: Lowering, op: ops.HeadNorm, live: frozenset[str]) -> None:
    heads = _pending(state, op, op.x)
    if heads.norm is not None:
        raise ValueError("HeadNorm: the CUDA kernels support one before each Store")
    heads.norm, heads.order = op, "first" if heads.rope is None else "last"


def _rotate(state: Lowering, op: ops.Rotate, live: frozenset[str]) -> None:
    heads = _pending(state, op, op.x)
    if heads.rope is not None:
        raise ValueError("Rotate: the CUDA kernels support one before each Store")
    heads.rope = op.rope


def _pending(state: Lowering, op: Op, names: tuple[str, ...]) -> Heads:
    """Return the norms and rotation that wait for a `Store`."""
    if state.heads is None:
        state.heads = Heads(names)
    if len(names) != 2 or state.heads.names != names:
        raise ValueError(f"{type(op).__name__} of {', '.join(names)}: the CUDA kernels need queries and keys together")
    return state.heads


def _store(state: Lowering, op: ops.Store, live: frozenset[str]) -> None:
    """Lower the norms, the rotation and the cache write of a layer; queries move to a register of their own."""
    machine, heads = state.machine, state.heads or Heads(())
    state.heads = None
    attend = next(one for one in state.part if isinstance(one, ops.Attend) and one.layer == op.layer)
    q, k, v = (state.places[name] for name in (attend.q, op.k, op.v))
    found = [(one.register, one.start) for one in (q, k, v)]
    is_adjacent = found == [(q.register, start) for start in (0, q.width, q.width + k.width)]
    if not is_adjacent or (heads.names and heads.names != (attend.q, op.k)) or (attend.k, attend.v) != (op.k, op.v):
        raise ValueError("Store: the CUDA kernels need queries, keys and values of one Linear, in this order")
    norm = heads.norm
    weights = [machine.weights.tensors[spec.name] for spec in norm.norms] if norm and norm.norms else [None, None]
    norms = HeadNorms(
        order=heads.order,
        eps=norm.eps if norm else 0.0,
        offset=norm.offset if norm else 0.0,
        q_D=weights[0],
        k_D=weights[1],
    )
    cos_LF, sin_LF = (None, None) if heads.rope is None else machine.ropes[heads.rope]
    qkv = Columns(q.register, 0, q.width + k.width + v.width)
    state.stored = None if cos_LF is None or sin_LF is None else StoredHeads(qkv, cos_LF, sin_LF, norms)
    out = state.place([attend.q], [q.width])

    def run(step: Pass | None, n: int) -> None:
        machine.kernels.operate.rotate_and_store(
            machine.registers.rows(out, n).view(n, attend.num_heads, attend.head_dim),
            *(machine.registers.read(qkv, n), cos_LF, sin_LF),
            *(_of(step).position_T.narrow(0, 0, n), _of(step).row_T.narrow(0, 0, n)),
            *(_of(step).cache(op.layer), norms),
        )

    state.launches.append(run)


def _attend(state: Lowering, op: ops.Attend, live: frozenset[str]) -> None:
    machine, q = state.machine, state.places[op.q]
    out = state.place([op.out], [op.num_heads * op.head_dim])
    windowed, full = (AttentionSpec(op.scale, window, op.softcap) for window in (op.window, None))

    def run(step: Pass | None, n: int) -> None:
        tokens, shape = _of(step), (n, op.num_heads, op.head_dim)
        out_THD, q_THD = (machine.registers.rows(one, n).view(shape) for one in (out, q.register))
        spec = windowed if tokens.has_windows else full
        for part in tokens.parts:
            part.attend(machine.kernels.attend, out_THD, q_THD, tokens.cache(op.layer), spec)

    state.launches.append(run)


def _keep(state: Lowering, op: ops.Keep, live: frozenset[str]) -> None:
    state.keep_after = len(state.launches)
    state.kept = tuple(sorted({state.places[name].register for name in live if name in state.places}))


def _add(state: Lowering, op: ops.Add, live: frozenset[str]) -> None:
    _mixed(state, op.x, op.y, op.out, None, state.machine.one_1, 1)


def _mix(state: Lowering, op: ops.Mix, live: frozenset[str]) -> None:
    a_1 = None if op.a is None else state.number(op.a)
    _mixed(state, op.x, op.y, op.out, a_1, state.number(op.b), op.sign)


def _mixed(state: Lowering, x: str, y: str, out: str, a_1: Tensor | None, b_1: Tensor, sign: int) -> None:
    machine, x_at, y_at = state.machine, state.places[x], state.places[y]
    register = state.place([out], [x_at.width])

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        machine.kernels.operate.mix(
            registers.rows(register, n), registers.read(x_at, n), registers.read(y_at, n), a_1, b_1, sign
        )

    state.launches.append(run)


def _activate(state: Lowering, op: ops.Activate, live: frozenset[str]) -> None:
    machine, gate, up = state.machine, state.places[op.gate], None if op.up is None else state.places[op.up]
    out = state.place([op.out], [gate.width])

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        up_TW = None if up is None else registers.read(up, n)
        machine.kernels.operate.activate(registers.rows(out, n), registers.read(gate, n), up_TW, op.kind)

    state.launches.append(run)


def _gate_values(state: Lowering, op: ops.GateValues, live: frozenset[str]) -> None:
    machine = state.machine
    v, gate, more = (state.places[name] for name in (op.v, op.gate, op.more))

    def run(step: Pass | None, n: int) -> None:
        v_TW, gate_TJ, more_TW = (machine.registers.read(one, n) for one in (v, gate, more))
        machine.kernels.operate.gate_values(v_TW, gate_TJ, more_TW, op.head_dim, op.scale)

    state.launches.append(run)


def _smear(state: Lowering, op: ops.Smear, live: frozenset[str]) -> None:
    machine, x = state.machine, state.whole(op, op.x)
    gate, before = state.places[op.gate], state.places[op.before]
    share_1 = state.number(op.share)

    def run(step: Pass | None, n: int) -> None:
        registers = machine.registers
        gate_T1, before_TW = registers.read(gate, n), registers.read(before, n)
        previous_T = _of(step).previous_T.narrow(0, 0, n)
        machine.kernels.operate.smear(registers.rows(x, n), gate_T1, before_TW, share_1, previous_T)

    state.launches.append(run)


def _softcap(state: Lowering, op: ops.Softcap, live: frozenset[str]) -> None:
    if state.is_wide:
        state.softcap = op.cap
        return
    machine, x = state.machine, state.whole(op, op.x)
    state.launches.append(lambda step, n: machine.kernels.operate.softcap(machine.registers.rows(x, n), op.cap))


_LOWERINGS: Mapping[type[Op], Callable[..., None]] = {
    ops.Embed: _embed,
    ops.Copy: _copy,
    ops.Widen: _copy,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.HeadNorm: _head_norm,
    ops.Rotate: _rotate,
    ops.Store: _store,
    ops.Attend: _attend,
    ops.Keep: _keep,
    ops.Reduce: _reduce,
    ops.Add: _add,
    ops.Mix: _mix,
    ops.Activate: _activate,
    ops.GateValues: _gate_values,
    ops.Smear: _smear,
    ops.Softcap: _softcap,
    **STATE_LOWERINGS,
}
