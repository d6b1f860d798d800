"""Weight updates of rank 0: every tensor is cut into the ranks' parts; all ranks accept an update, or none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from nano_inference.executors.protocol import Staged
from nano_inference.loading.gguf import PackedTensor
from nano_inference.loading.pieces import DTYPES, FileRange
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.parallel.group import Group
from nano_inference.parallel.messages import pack
from nano_inference.parallel.shard import Cut, Shard, shard
from nano_inference.types import EngineDead, WeightError

Result = TypeVar("Result")


class Whole:
    """A program and its parts on all ranks."""

    def __init__(self, program: Program, size: int) -> None:
        self.program = program
        self.shards = tuple(shard(program, rank, size) for rank in range(size))

    @cached_property
    def specs(self) -> tuple[Mapping[str, WeightSpec], ...]:
        """Return each rank's weights by name; a bias that is added once is on rank 0 only."""
        return tuple({spec.name: spec for spec in part.program.weights} for part in self.shards)

    def is_cut(self, name: str) -> bool:
        """Return whether each rank has a part of a weight, or all of it."""
        return name in self.shards[0].cuts

    def joined(self, name: str, own: Tensor, group: Group) -> Tensor:
        """Return a weight that is cut; the other ranks send their parts through `group`."""
        (shape,) = (spec.shape for spec in self.program.weights if spec.name == name)
        full = torch.empty(shape, dtype=own.dtype)
        for rank, part in enumerate(self.shards):
            cut = part.cuts[name]
            target = full.narrow(cut.axis, cut.start, cut.stop - cut.start)
            if rank == 0:
                target.copy_(own)
            else:
                received = torch.empty(target.shape, dtype=own.dtype)
                group.receive(received, rank)
                target.copy_(received)
        return full


class WeightFeed:
    """Sends weight updates to the other ranks, one message at a time. Every method raises `EngineDead`."""

    def __init__(self, group: Group, lock: RLock, number: int, fail: Callable[[EngineDead], EngineDead]) -> None:
        """`lock` is held during each message; `number` is the executor's.

        `fail` ends the engine after a rank was lost, or did not take part in time; it returns the exception to raise.
        """
        self._group, self._lock, self._id, self._fail = group, lock, number, fail

    def send(self, command: str, arguments: Mapping[str, Any]) -> None:
        """Send a command without a reply."""
        self._locked(lambda: self._send(command, arguments))

    def ask(self, command: str, arguments: Mapping[str, Any], own: str = "") -> list[str]:
        """Send a command; return every rank's reply, this one's `own` included."""

        def work() -> list[str]:
            self._send(command, arguments)
            return self._group.exchange(own)

        return self._locked(work)

    def send_weight(self, command: str, whole: Whole, name: str, source: WeightSource) -> None:
        """Send each rank its part of a tensor, or the name of the file from which it reads its part."""
        about: dict[str, Any] = {"name": name, "shape": list(source.shape), "dtype": source.dtype}
        if isinstance(source, FileRange):
            self.send(command, {**about, "path": str(source.path.absolute()), "offset": source.offset})
            return

        def work() -> None:
            self._send(command, about)
            for rank in (one for one in range(1, len(whole.shards)) if name in whole.specs[one]):
                part = part_of(source, whole.shards[rank].cuts.get(name))
                assert isinstance(part, TensorSource)
                self._group.send(part.tensor.cpu(), rank)

        self._locked(work)

    def gather(self, whole: Whole, name: str, own: Tensor) -> Tensor:
        """Return a whole weight of an update that all ranks have finished; `own` is this rank's part."""
        if not whole.is_cut(name):
            return own

        def work() -> Tensor:
            self._send("staged_values", {"name": name})
            return whole.joined(name, own, self._group)

        return self._locked(work)

    def _send(self, command: str, arguments: Mapping[str, Any]) -> None:
        self._group.broadcast(pack(command, {"id": self._id, **arguments}))

    def _locked(self, work: Callable[[], Result]) -> Result:
        try:
            with self._lock:
                return work()
        except EngineDead as error:  # without the lock: `fail` waits for the end of a step
            raise self._fail(error) from error


class ShardedStaged:
    """Owns an update until all ranks have accepted it; satisfies `protocol.Staged`, which documents it."""

    def __init__(self, own: Staged, whole: Whole, feed: WeightFeed, *, is_fed: bool) -> None:
        """`own` stages this rank's part. Without `is_fed`, the other ranks have the same tensors themselves."""
        self._own, self._whole, self._feed, self._is_fed = own, whole, feed, is_fed

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        if self._is_fed:
            self._feed.send_weight("item", self._whole, spec.name, source)
        return self._own.put(self._whole.specs[0][spec.name], self._part(spec, source))

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        is_same = self._own.has_same(self._whole.specs[0][spec.name], self._part(spec, source))
        if not self._is_fed:
            return is_same
        self._feed.send_weight("compare", self._whole, spec.name, source)
        return all(not reply for reply in self._feed.ask("compared", {}, "" if is_same else "differs"))

    def _part(self, spec: WeightSpec, source: WeightSource) -> WeightSource:
        return part_of(source, self._whole.shards[0].cuts.get(spec.name))

    def finish(self) -> Any:
        """Return this rank's new weights once every rank has finished. Raises `WeightError` if one has refused."""
        finished = self._own.finish()
        replies = self._feed.ask("finish", {})
        for rank, fault in enumerate(replies):
            if fault:
                self.discard()
                raise WeightError(f"rank {rank}: {fault}")
        return finished

    def discard(self) -> None:
        self._own.discard()
        self._feed.send("discard", {})


def source_of(about: Mapping[str, Any], spec: WeightSpec | None, part: Shard, group: Group) -> WeightSource | None:
    """Return this rank's part of a tensor that rank 0 sends or names; None if it has none (`spec` is None)."""
    if "path" in about:
        whole = FileRange(Path(about["path"]), about["offset"], tuple(about["shape"]), about["dtype"])
        return None if spec is None else part_of(whole, part.cuts.get(spec.name))
    if spec is None:
        return None
    tensor = torch.empty(spec.shape, dtype=DTYPES[about["dtype"]])
    group.receive(tensor, 0)
    return TensorSource(tensor)


def part_of(source: WeightSource, cut: Cut | None) -> WeightSource:
    """Return the part of a weight; without a cut, the weight itself.

    Raises `TypeError` for a kind of source that cannot be divided (one of a plugin's format).
    """
    if cut is None:
        return source
    if isinstance(source, TensorSource):
        return TensorSource(source.tensor.narrow(cut.axis, cut.start, cut.stop - cut.start))
    if isinstance(source, FileRange | PackedTensor):
        return source.rows(cut.start, cut.stop) if cut.axis == 0 else source.columns(cut.start, cut.stop)
    raise TypeError(f"tensor_parallel: weights of the kind {type(source).__name__} cannot be divided")


def parts_of(sources: Mapping[str, WeightSource], part: Shard) -> dict[str, WeightSource]:
    """Return a rank's part of every weight that it has."""
    own = {spec.name for spec in part.program.weights}
    return {name: part_of(source, part.cuts.get(name)) for name, source in sources.items() if name in own}
