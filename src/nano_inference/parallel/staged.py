"""Weight updates of rank 0: every tensor is cut into the ranks' parts; all ranks accept an update, or none does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nano_inference.executors.protocol import Executor, Staged
from nano_inference.executors.staging import Pace
from nano_inference.loading.packed import PackedTensor
from nano_inference.loading.pieces import DTYPES, FileRange
from nano_inference.loading.sources import MappedSource, TensorSource, WeightSource
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.links import Announced, Group
from nano_inference.parallel.shard import Cut, Shard, shard
from nano_inference.types import WeightError

Result = TypeVar("Result")


class Whole:
    """A program and its parts on all ranks."""

    def __init__(self, program: Program, size: int) -> None:
        self.program = program
        self.shards = tuple(shard(program, rank, size) for rank in range(size))
        self.specs: tuple[Mapping[str, WeightSpec], ...] = tuple(
            {spec.name: spec for spec in part.program.weights} for part in self.shards
        )
        """Each rank's weights by name; a bias that is added once is on rank 0 only."""

    def is_cut(self, name: str) -> bool:
        """Return whether each rank has a part of a weight, or all of it."""
        return name in self.shards[0].cuts

    def joined(self, name: str, own: Tensor, group: Group) -> Tensor:
        """Return a weight that is cut; the other ranks send their parts through `group`."""
        (shape,) = (spec.shape for spec in self.program.weights if spec.name == name)
        full = torch.empty(shape, dtype=own.dtype)
        for rank, part in enumerate(self.shards):
            cut = part.cuts[name]
            shape = self.specs[rank][name].shape
            found = group.receive(torch.empty(shape, dtype=own.dtype), rank) if rank else own
            pieces = torch.split(found, [len(one) for one in cut.ranges], dim=cut.axis)
            for one, piece in zip(cut.ranges, pieces, strict=True):
                full.narrow(cut.axis, one.start, len(one)).copy_(piece)
        return full


class ShardedWeights:
    """The weights of all ranks; satisfies `protocol.Weights`, which documents the methods."""

    def __init__(self, own: Executor, whole: Whole, leader: Leader, number: int) -> None:
        """`own` has rank 0's part; `number` is the executor's."""
        self._own, self._device, self._program = own.weights, own.device, whole.program
        self._whole, self._leader, self._number = whole, leader, number

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> ShardedStaged:
        with self._leader.updating() as group:
            group.broadcast("stage", self._number, {"check_finite": check_finite, "paced": pace is not None})
        own = self._own.stage(pace=pace, check_finite=check_finite)
        return ShardedStaged(own, self._whole, self._leader, self._number)

    def commit(self, staged: Any) -> None:
        self._ask("commit", lambda: self._own.commit(staged))

    def drop_spare(self) -> None:
        self._ask("drop_spare", self._own.drop_spare)

    def discard(self) -> None:
        self._ask("discard", self._own.discard)

    def move(self, device: torch.device) -> None:
        self._ask("move", lambda: self._own.move(device), "here" if device == self._device else "away")

    def values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole weight), put together from the ranks' parts."""
        commands = self._leader.links.commands
        for spec in self._program.weights:
            name = spec.name
            if names is None or name in names:
                ((_, own),) = self._own.values((name,))
                if self._whole.is_cut(name):
                    own = self._ask("values", partial(self._whole.joined, name, own, commands), name)
                yield name, own

    def staged_values(self, staged: Any) -> Iterator[tuple[str, Tensor]]:
        own = dict(self._own.staged_values(staged))
        for spec in self._program.weights:
            value = own[spec.name]
            if self._whole.is_cut(spec.name):
                with self._leader.updating() as group:
                    group.broadcast("staged_values", self._number, spec.name)
                    value = self._whole.joined(spec.name, value, group)
            yield spec.name, value

    @property
    def dtype(self) -> str:
        return self._own.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of rank 0's weights."""
        return self._own.num_bytes

    def _ask(self, command: str, work: Callable[[], Result], *arguments: Any) -> Result:
        return self._leader.ask(command, self._number, list(arguments), work)


class ShardedStaged:
    """Owns an update until all ranks have accepted it; satisfies `protocol.Staged`, which documents it."""

    def __init__(self, own: Staged, whole: Whole, leader: Leader, number: int) -> None:
        """`own` stages this rank's part; `number` is the executor's."""
        self._own, self._whole, self._leader, self._number = own, whole, leader, number

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        if self._leader.is_fed:
            with self._leader.updating() as group:
                self._send("item", spec.name, source, group)
        return self._own.put(self._whole.specs[0][spec.name], self._part(spec, source))

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        is_same = self._own.has_same(self._whole.specs[0][spec.name], self._part(spec, source))
        if not self._leader.is_fed:
            return is_same
        with self._leader.updating() as group:
            self._send("compare", spec.name, source, group)
            return not any(group.exchange("" if is_same else "differs"))

    def finish(self) -> Any:
        """Return this rank's new weights once every rank has finished. Raises `WeightError` if one has refused."""
        finished = self._own.finish()
        with self._leader.updating() as group:
            group.broadcast("finish", self._number)
            faults = group.exchange("")
        for rank, fault in enumerate(faults):
            if fault:
                self.discard()
                raise WeightError(f"rank {rank}: {fault}")
        return finished

    def discard(self) -> None:
        self._own.discard()
        with self._leader.updating() as group:
            group.broadcast("cancel", self._number)

    def _part(self, spec: WeightSpec, source: WeightSource) -> WeightSource:
        return part_of(source, self._whole.shards[0].cuts.get(spec.name))

    def _send(self, command: str, name: str, source: WeightSource, group: Group) -> None:
        """Send each rank its part of a tensor, or the name of the file from which it reads its part."""
        file = replace(source, path=source.path.absolute()) if isinstance(source, FileRange) else None
        group.broadcast(command, self._number, Announced(name, source.dtype, file))
        for rank, specs in enumerate(self._whole.specs):
            if rank and name in specs and not isinstance(source, FileRange):
                part = part_of(source, self._whole.shards[rank].cuts.get(name))
                assert isinstance(part, TensorSource)
                group.send(part.tensor.cpu(), rank)


def source_of(about: Announced, spec: WeightSpec, cut: Cut | None, group: Group) -> WeightSource:
    """Return this rank's part of a tensor that rank 0 sends or names."""
    if about.file is not None:
        return part_of(about.file, cut)
    return TensorSource(group.receive(torch.empty(spec.shape, dtype=DTYPES[about.dtype]), 0))


def part_of(source: WeightSource, cut: Cut | None) -> WeightSource:
    """Return the part of a weight; without a cut, the weight itself.

    Raises `TypeError` for a kind of source that cannot be divided (one of a plugin's format).
    """
    if cut is None:
        return source
    if len(cut.ranges) > 1:  # adjacent in the weight of one rank
        parts = [part_of(source, Cut(cut.axis, (one,))) for one in cut.ranges]
        return TensorSource(torch.cat([_tensor_of(part) for part in parts], dim=cut.axis))
    (one,) = cut.ranges
    if isinstance(source, TensorSource):
        return TensorSource(source.tensor.narrow(cut.axis, one.start, len(one)))
    if isinstance(source, FileRange | PackedTensor):
        return source.rows(one.start, one.stop) if cut.axis == 0 else source.columns(one.start, one.stop)
    if isinstance(source, MappedSource):
        return replace(source, source=part_of(source.source, cut))
    raise TypeError(f"tensor_parallel: weights of the kind {type(source).__name__} cannot be divided")


def _tensor_of(source: WeightSource) -> Tensor:
    if isinstance(source, TensorSource):
        return source.tensor
    tensor = torch.empty(source.shape, dtype=DTYPES.get(source.dtype, torch.float32))
    source.read_into(tensor)
    return tensor


def parts_of(sources: Mapping[str, WeightSource], part: Shard) -> dict[str, WeightSource]:
    """Return a rank's part of every weight that it has."""
    own = {spec.name for spec in part.program.weights}
    return {name: part_of(source, part.cuts.get(name)) for name, source in sources.items() if name in own}
