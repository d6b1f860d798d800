"""`shard`: divides a program among ranks, as in Megatron-LM (arXiv 1909.08053). No torch.

Attention is divided by whole heads, the gated delta rule by whole key heads, the MLP by its inner units, and the
vocabulary by ranges of ids. A `Linear` that
feeds a divided buffer keeps some rows of its matrices; one that reads a divided buffer keeps some columns, and a
`Reduce` adds the ranks' results. Other operations are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

from nano_inference.models.ops import (
    Activate,
    Attend,
    Convolve,
    Embed,
    Gate,
    GatedDelta,
    GatedNorm,
    GateValues,
    HeadNorm,
    Keep,
    Linear,
    Op,
    Reduce,
    Rotate,
    Store,
    TablePart,
    Unzip,
    WeightSpec,
)
from nano_inference.models.program import Program

_UNITS = (512, 64, 8)
"""Preferred alignments of a vocabulary's parts: the sampler adds probabilities in blocks of 512 ids."""
_MOST_UNEVEN = 1.05  # a preferred alignment may make the largest part this much larger than an even one
_MOST_RANKS = 64


Columns = tuple[range, ...]  # several: of a matrix with queries, keys and values


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that one rank has: ranges of indices of dimension `axis`, one after the other."""

    axis: int
    ranges: Columns


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The token ids of one rank's logits: [start, stop)."""

    start: int
    stop: int
    total: int  # size of the vocabulary

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of a program."""

    rank: int
    size: int
    program: Program  # with the shapes of this rank's weights; its logits are those of `vocabulary`
    cuts: Mapping[str, Cut]  # by weight; a weight without a cut is whole
    vocabulary: VocabularyPart


def shard(program: Program, rank: int, size: int) -> Shard:
    """Return one rank's part of a program.

    Raises `ValueError` naming what `size` does not divide, or an operation that reads a divided buffer.
    """
    check_divisible(program, size)
    vocabulary = vocabulary_part(program.vocab_size, rank, size)
    division = _Division(rank, size, vocabulary)
    body, final = division.divided(program.body, {}), division.divided(program.final, {})
    head = division.divided(program.head, {"logits": (range(vocabulary.start, vocabulary.stop),)})
    own = replace(program, body=body, final=final, head=head, vocab_size=vocabulary.size)
    return Shard(rank=rank, size=size, program=own, cuts=MappingProxyType(division.cuts), vocabulary=vocabulary)


def check_divisible(program: Program, size: int) -> None:
    """Raise `ValueError` unless every layer can be divided among `size` ranks; it names the sizes that can be."""
    fault = _fault(program, size)
    if fault is None:
        return
    fitting = [str(other) for other in range(2, _MOST_RANKS + 1) if _fault(program, other) is None]
    hint = f"possible: {', '.join(fitting)}" if fitting else "this model cannot be divided"
    raise ValueError(f"tensor_parallel: {size} {fault}; {hint}")


def _fault(program: Program, size: int) -> str | None:
    """Return why a program cannot be divided among `size` ranks; None if it can."""
    if (size - 1) * _part_size(program.vocab_size, size) >= program.vocab_size:
        return f"is too many for a vocabulary of {program.vocab_size}"
    for op in program.body:
        if isinstance(op, Attend):
            if op.num_heads % size:
                return f"does not divide the {op.num_heads} attention heads"
            if op.num_kv_heads % size and size % op.num_kv_heads:
                return f"neither divides the {op.num_kv_heads} key/value heads nor is a multiple of them"
        elif isinstance(op, GatedDelta) and op.is_tiled:
            return "does not divide the value heads of this GGUF file: a block of out_proj holds several"
        elif isinstance(op, GatedDelta) and op.num_k_heads % size:
            return f"does not divide the {op.num_k_heads} key heads of linear attention"
    for op, widths in zip(program.body, _widths(program.body), strict=True):
        if isinstance(op, Activate) and widths[op.gate] % size:
            return f"does not divide the {widths[op.gate]} inner units of the MLP"
    return None


def _widths(body: Sequence[Op], given: Mapping[str, int] = MappingProxyType({})) -> list[dict[str, int]]:
    widths = dict(given)
    found: list[dict[str, int]] = []
    for op in body:
        found.append(dict(widths))
        if isinstance(op, Embed):
            widths[op.out] = op.table.shape[1]
        elif isinstance(op, Linear):
            widths |= zip(op.out, op.widths, strict=True)
        elif isinstance(op, Attend):
            widths[op.out] = op.num_heads * op.head_dim
        elif isinstance(op, Unzip):
            num_groups = widths[op.x] // sum(op.widths)
            widths |= {name: num_groups * width for name, width in zip(op.out, op.widths, strict=True)}
        elif isinstance(op, Convolve):
            widths |= zip(op.out, op.widths, strict=True)
        elif isinstance(op, GatedDelta):
            widths[op.out] = op.num_v_heads * op.v_dim
        elif op.writes and op.reads and not set(op.writes) <= set(op.reads):
            widths |= dict.fromkeys(op.writes, widths.get(op.reads[0], 0))
    return found


def _part_size(vocab_size: int, size: int) -> int:
    """Return the ids of each rank but the last, which may have fewer: aligned as far as the parts stay similar."""
    parts = [-(-vocab_size // (size * unit)) * unit for unit in _UNITS]
    return next((part for part in parts if part * size <= _MOST_UNEVEN * vocab_size), parts[-1])


def vocabulary_part(vocab_size: int, rank: int, size: int) -> VocabularyPart:
    """Return the token ids of a rank's logits; every rank has some, and all parts start at a multiple of 8."""
    part = _part_size(vocab_size, size)
    return VocabularyPart(rank * part, min((rank + 1) * part, vocab_size), vocab_size)


def _side_by_side(columns: Sequence[Columns], widths: Sequence[int]) -> Columns:
    """Return columns of adjacent buffers as columns of all of them together."""
    starts = accumulate(widths, initial=0)
    pairs = zip(columns, starts, strict=False)
    return tuple(range(start + one.start, start + one.stop) for ranges, start in pairs for one in ranges)


_BY_HEAD = (HeadNorm, Rotate, Store, GateValues, Activate, Keep, Unzip, GatedNorm, Gate)
"""Operations that compute each head, or each column, on its own."""


@dataclass
class _Division:
    rank: int
    size: int
    vocabulary: VocabularyPart
    cuts: dict[str, Cut] = field(default_factory=dict)

    def divided(self, part: Sequence[Op], results: Mapping[str, Columns]) -> tuple[Op, ...]:
        """Return this rank's operations; `results` are the columns of the part's divided results."""
        wanted = self._wanted(part, results)
        own: dict[str, Columns] = {}  # the columns that this rank has of each divided buffer
        done: list[Op] = []
        for op, demand in zip(part, wanted, strict=True):
            if isinstance(op, Embed):
                done += self._embed(op, demand)
            elif isinstance(op, Linear):
                done += self._linear(op, demand, own)
            elif isinstance(op, Attend):
                heads, kv = self._heads(op.num_heads, 1), self._heads(op.num_kv_heads, 1)
                done.append(replace(op, num_heads=sum(map(len, heads)), num_kv_heads=sum(map(len, kv))))
            elif isinstance(op, Convolve):
                outs = [demand.get(name) or own[name] for name in op.out]
                weight = self._cut(op.weight, Cut(0, _side_by_side(outs, op.widths)))
                done.append(replace(op, weight=weight, widths=tuple(sum(map(len, one)) for one in outs)))
            elif isinstance(op, GatedDelta):
                numbers = Cut(0, self._heads(op.num_v_heads, 1))
                a_log, dt_bias = self._cut(op.a_log, numbers), self._cut(op.dt_bias, numbers)
                num_k, num_v = op.num_k_heads // self.size, op.num_v_heads // self.size
                done.append(replace(op, a_log=a_log, dt_bias=dt_bias, num_k_heads=num_k, num_v_heads=num_v))
            else:
                split = set(op.reads) & own.keys() - {"logits"}  # `Widen` and `Softcap` work on any columns
                if split and not isinstance(op, _BY_HEAD):
                    raise ValueError(f"tensor_parallel: {type(op).__name__} reads {split.pop()}, which is divided")
                done.append(op)
            own = {name: columns for name, columns in own.items() if name not in op.writes or name in op.reads}
            if isinstance(op, Attend):
                own[op.out] = self._heads(op.num_heads, op.head_dim)
            elif isinstance(op, Activate | GatedNorm | Gate):
                own[op.out] = own[op.gate]
            elif isinstance(op, GatedDelta):
                own[op.out] = self._heads(op.num_v_heads, op.v_dim)
            own |= demand
        return tuple(done)

    def _wanted(self, part: Sequence[Op], results: Mapping[str, Columns]) -> list[dict[str, Columns]]:
        """Return, for each operation, the columns that later operations need of the buffers that it creates."""
        needed: dict[str, Columns] = dict(results)
        found: list[dict[str, Columns]] = []
        for op, widths in zip(reversed(part), reversed(_widths(part)), strict=True):
            created = set(op.writes) - set(op.reads)
            found.append({name: needed.pop(name) for name in created if name in needed})
            needed |= self._needs(op, widths, {**needed, **found[-1]})
        return found[::-1]

    def _needs(self, op: Op, widths: Mapping[str, int], needed: Mapping[str, Columns]) -> dict[str, Columns]:
        """Return the columns that this rank needs of the buffers that an operation reads.

        `needed` are those that it and later ones need of other buffers.
        """
        if isinstance(op, Attend):
            kv = self._heads(op.num_kv_heads, op.head_dim)
            return {op.q: self._heads(op.num_heads, op.head_dim), op.k: kv, op.v: kv}
        if isinstance(op, GateValues):
            (values,) = needed[op.v]
            return {op.more: (values,), op.gate: (range(values.start // op.head_dim, values.stop // op.head_dim),)}
        if isinstance(op, Unzip):
            group = sum(op.widths)
            return {op.x: self._heads(widths[op.x] // group, group)} if {*op.out} & needed.keys() else {}
        if isinstance(op, Convolve):
            outs = [needed[name] for name in op.out]
            return {op.x[0]: _side_by_side(outs, op.widths)} if len(op.x) == 1 else dict(zip(op.x, outs, strict=True))
        if isinstance(op, GatedDelta):
            keys, numbers = self._heads(op.num_k_heads, op.k_dim), self._heads(op.num_v_heads, 1)
            return {op.q: keys, op.k: keys, op.v: self._heads(op.num_v_heads, op.v_dim), op.a: numbers, op.b: numbers}
        if isinstance(op, GatedNorm | Gate):
            return {op.gate: self._heads(widths[op.gate], 1)}
        if isinstance(op, Activate):
            columns = self._heads(widths[op.gate], 1)
            return {op.gate: columns} if op.up is None else {op.gate: columns, op.up: columns}
        return {}

    def _heads(self, count: int, width: int) -> Columns:
        """Return this rank's columns of `count` heads; a head is shared if there are fewer heads than ranks."""
        if count % self.size:
            head = self.rank * count // self.size
            return (range(head * width, (head + 1) * width),)
        each = count // self.size * width
        return (range(self.rank * each, (self.rank + 1) * each),)

    def _embed(self, op: Embed, demand: Mapping[str, Columns]) -> list[Op]:
        """Divide a table by columns if its output is divided, otherwise by rows."""
        if op.out in demand:
            return [replace(op, table=self._cut(op.table, Cut(1, demand[op.out])))]
        num_rows = op.table.shape[0]
        rows = self._rows(num_rows)
        if op.rows == "pair":
            each = -(-num_rows // self.size)
            rows = range(min(self.rank * each, num_rows), min((self.rank + 1) * each, num_rows))
        table = self._cut(op.table, Cut(0, (rows,)))
        return [replace(op, table=table, part=TablePart(rows.start, num_rows)), Reduce(x=op.out)]

    def _linear(self, op: Linear, demand: Mapping[str, Columns], own: Mapping[str, Columns]) -> list[Op]:
        if op.x in own:  # the columns of the inputs that this rank has; rank 0 alone adds a bias
            if demand:
                raise ValueError(f"tensor_parallel: a projection of {op.x} to {', '.join(demand)} cannot be divided")
            kept = tuple(self._cut(one, Cut(1, own[op.x])) for one in op.matrices)
            product = replace(op, matrices=kept, biases=op.biases if self.rank == 0 else ())
            return [product, *(Reduce(x=name) for name in op.out)]
        matrices, biases = list(op.matrices), list(op.biases)
        num_rows = op.num_rows
        for index, name in enumerate(op.out):
            if name not in demand:
                continue
            rows = demand[name]
            if name == "logits":
                num_rows = sum(map(len, rows))
                rows = (self._rows(op.matrices[index].shape[0]),)
            matrices[index] = self._cut(op.matrices[index], Cut(0, rows))
            if biases:
                biases[index] = self._cut(op.biases[index], Cut(0, rows))
        return [replace(op, matrices=tuple(matrices), biases=tuple(biases), num_rows=num_rows)]

    def _rows(self, num_rows: int) -> range:
        """Return this rank's rows of a table of tokens; the last rank has the padding of the vocabulary."""
        is_last = self.rank == self.size - 1
        return range(self.vocabulary.start, num_rows if is_last else self.vocabulary.stop)

    def _cut(self, spec: WeightSpec, cut: Cut) -> WeightSpec:
        """Return this rank's part of a weight. Raises `ValueError` if two operations need different parts."""
        if self.cuts.setdefault(spec.name, cut) != cut:
            raise ValueError(f"tensor_parallel: {spec.name} is used in two ways that divide it differently")
        shape = list(spec.shape)
        shape[cut.axis] = sum(map(len, cut.ranges))
        return replace(spec, shape=tuple(shape))
