"""Fuses adjacent operations of a program: for up to `FUSED_ROWS` tokens, one launch replaces those of all of them.

Two chains are fused: `Add`, `Norm`, `Linear` and perhaps `Activate`; and `Store`, with its norms and rotation, and
`Attend`. Other operations, and chains whose intermediate results are read elsewhere, keep their launches. A token has
the same bits either way.

Shapes: T tokens of a pass, N outputs and K inputs of a product, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nano_inference.executors.cuda.passes import Pass
from nano_inference.executors.cuda.records import FUSED_ROWS, NewHeads, SumNorm
from nano_inference.executors.cuda.registers import Columns, Lowering
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.models import ops


def chain_size(state: Lowering, index: int) -> int:
    """Return how many operations from an index on can be one launch; 1 if only the first."""
    live = state.live
    match state.part[index : index + 4]:
        case [ops.Store() as store, ops.Attend(softcap=None) as attend, *_] if store.layer == attend.layer:
            return 2 if state.heads is not None and state.heads.rope is not None else 1
        case [ops.Add() as add, ops.Norm() as norm, ops.Linear() as linear, *after]:
            is_chain = (norm.x, linear.x) == (add.out, norm.out) and norm.weight is not None
            is_whole = linear.matrices[0].shape[1] == state.places[add.x].width
            if not is_chain or not is_whole or not live[index + 2].isdisjoint({norm.out}.difference(linear.out)):
                return 1
            is_activated = after and isinstance(after[0], ops.Activate) and not linear.biases
            return 4 if is_activated and _takes_all(after[0], linear, live[index + 3]) else 3
    return 1


def _takes_all(op: ops.Op, linear: ops.Linear, live: frozenset[str]) -> bool:
    """Return whether an activation is the only operation that reads a product."""
    return op.reads == linear.out and live.isdisjoint(set(linear.out).difference(op.writes))


def fuse(state: Lowering, index: int, size: int, given: Mapping[str, Columns], first: int) -> None:
    """Replace the launches, from number `first` on, of a chain that was lowered, by one.

    `given` are the places of the chain's inputs. None of its registers may have been released since.
    """
    chain = state.part[index : index + size]
    singly = tuple(state.launches[first:])
    make = _attention if isinstance(chain[0], ops.Store) else _product
    together = make(state, chain, given)
    del state.launches[first:]

    def run(step: Pass | None, n: int) -> None:
        if n > FUSED_ROWS or not together(step, n):
            for launch in singly:
                launch(step, n)

    state.launches.append(run)


Together = Callable[[Pass | None, int], bool]
"""Computes a chain for the first n tokens of a pass, or returns False if this pass needs single launches."""


def _product(state: Lowering, chain: Sequence[ops.Op], given: Mapping[str, Columns]) -> Together:
    add, norm, linear, *after = chain
    assert isinstance(add, ops.Add) and isinstance(norm, ops.Norm) and isinstance(linear, ops.Linear)
    assert norm.weight is not None
    machine, kind = state.machine, after[0].kind if after and isinstance(after[0], ops.Activate) else None
    norm_K, (weight_NK, bias_N) = machine.weights.tensors[norm.weight.name], state.matrix(linear)
    x, more, total = given[add.x], given[add.y], state.places[add.out]
    out = state.places[chain[-1].writes[0]].register
    assert not {x.register, more.register}.intersection((total.register, out)) and out != total.register

    def run(step: Pass | None, n: int) -> bool:
        if step is not None and step.adapter_T is not None:
            return False
        registers = machine.registers
        summed = SumNorm(
            x_TK=registers.read(x, n),
            more_TK=registers.read(more, n),
            sum_TK=registers.rows(total.register, n),
            weight_K=norm_K,
            eps=norm.eps,
            offset=norm.offset,
        )
        machine.kernels.multiply.multiply_norm(registers.rows(out, n), summed, weight_NK, bias_N, kind, machine.ranges)
        return True

    return run


def _attention(state: Lowering, chain: Sequence[ops.Op], given: Mapping[str, Columns]) -> Together:
    op, machine, stored = chain[1], state.machine, state.stored
    assert isinstance(op, ops.Attend) and stored is not None
    out, shape = state.places[op.out].register, (op.num_heads, op.head_dim)
    assert out != stored.qkv.register
    windowed, full = (AttentionSpec(op.scale, window) for window in (op.window, None))

    def run(step: Pass | None, n: int) -> bool:
        assert step is not None
        part = step.parts[0]
        if part.num_tokens < n or part.max_queries > 1 or part.partials is None or part.groups is not None:
            return False
        heads = NewHeads(
            qkv_TW=machine.registers.read(stored.qkv, n),
            cos_LF=stored.cos_LF,
            sin_LF=stored.sin_LF,
            norms=stored.norms,
        )
        machine.kernels.attend.attend_rows(
            *(machine.registers.rows(out, n).view(n, *shape), part.partials, heads, step.position_T.narrow(0, 0, n)),
            *(step.cache(op.layer), windowed if step.has_windows else full, machine.ranges.done_I),
        )
        return True

    return run
