"""The process groups through which the ranks of one engine communicate.

Shapes: T ranks.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from nano_inference.core.step import BlockCopy, Row, RowState
from nano_inference.executors.protocol import CacheSize
from nano_inference.loading.pieces import FileRange
from nano_inference.support.checks import from_known
from nano_inference.types import EngineDead, SamplingParams

JOIN_S = 60.0  # longest wait for the other ranks when the groups are formed
WAIT = timedelta(seconds=600)
"""Longest wait of an operation for another rank that is alive; the loss of a process is seen at once."""
_IDLE = timedelta(days=365)  # longest wait of a rank for the next update. Lost ranks are found by the commands.
_FIRST_BYTES = 8192  # bytes of the broadcast with which a message starts; a longer message needs a second one
_HEADER = 8
_TEXT_BYTES = 1024


class Announced(NamedTuple):
    """A tensor of an update, as rank 0 announces it."""

    name: str
    dtype: str
    file: FileRange | None  # None: rank 0 sends each rank its part


_NAMED = {
    (one.__module__, one.__qualname__): one
    for one in (Row, RowState, BlockCopy, SamplingParams, from_known, CacheSize, Announced, FileRange, type(Path()))
}
"""All that a message may name, beside plain values. Not `getattr`, by which a pickle could reach any function."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        found = _NAMED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"a message of rank 0 names {module}.{name}, which is not in the list")
        return found


class Group:
    """Owns one rank's process group. Every rank calls the same methods in the same order.

    After an `EngineDead` the group is unusable: some ranks may have left an operation that others still wait in.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        is_registered: bool,
        idle: timedelta | None = None,
    ) -> None:
        """`group` is a torch process group, used from one thread; `timeout` limits every operation.

        `idle` limits the wait of `next_message` for the start of a message, by default `timeout`. `is_registered`:
        torch keeps a reference to the group, as to all results of `new_group`.
        """
        self.rank, self.size = rank, size
        self._group, self._timeout, self._idle, self._is_registered = group, timeout, idle or timeout, is_registered
        self.tensor_bytes = 0  # bytes of all tensors that this rank has contributed to `add` and `gather`

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, with the same bits on each. May overwrite `x`."""
        x = x.contiguous()
        self.tensor_bytes += x.nbytes
        self._wait(lambda: self._group.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors of one shape, [T, …]."""
        x = x.contiguous()
        self.tensor_bytes += x.nbytes
        found = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([found], [x]))
        return torch.stack(found)

    def add_in_place(self, x: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks, as `add`. On CUDA, return before it is computed."""
        self.tensor_bytes += x.nbytes
        options = dist.AllreduceOptions()
        options.asyncOp = False
        self._wait(lambda: self._group.allreduce([x], options), is_queued=x.is_cuda)

    def gather_into(self, out: Tensor, x: Tensor) -> None:
        """Write the ranks' tensors of x's shape to out, all contiguous. On CUDA, return before they have arrived."""
        self.tensor_bytes += x.nbytes
        options = AllgatherOptions()
        options.asyncOp = False
        self._wait(lambda: self._group._allgather_base(out.view(-1), x.view(-1), options), is_queued=x.is_cuda)

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor to one rank."""
        x = x.contiguous()
        self._wait(lambda: self._group.send([x], rank, 0))

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Fill a contiguous tensor with one that a rank sends; return it."""
        self._wait(lambda: self._group.recv([x], rank, 0))
        return x

    def broadcast(self, *message: Any) -> None:
        """Send objects to all other ranks, which call `next_message`. Only on rank 0."""
        text = pickle.dumps(message)
        data = len(text).to_bytes(_HEADER, "little") + text
        first = bytearray(data[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
        self._broadcast(torch.frombuffer(first, dtype=torch.uint8))
        if len(data) > _FIRST_BYTES:
            self._broadcast(torch.frombuffer(bytearray(data[_FIRST_BYTES:]), dtype=torch.uint8))

    def next_message(self) -> tuple[Any, ...]:
        """Return rank 0's next message. Raises `UnpicklingError` if it names another class than those listed."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._broadcast(first, self._idle)
        data = bytes(first.numpy().data)
        size = int.from_bytes(data[:_HEADER], "little")
        text = data[_HEADER : _HEADER + size]
        if len(text) < size:
            rest = torch.empty(size - len(text), dtype=torch.uint8)
            self._broadcast(rest)
            text += bytes(rest.numpy().data)
        message: tuple[Any, ...] = _Unpickler(io.BytesIO(text)).load()
        return message

    def exchange(self, text: str) -> list[str]:
        """Return the ranks' texts, cut off after `_TEXT_BYTES` bytes."""
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        found = self.gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [bytes(one.numpy().data).rstrip(b"\0").decode(errors="replace") for one in found]

    def abort(self) -> None:
        """End operations that NCCL's kernels wait in, those of a CUDA graph included; Gloo's end with a lost rank."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Leave the group; other ranks that wait for this one get an error. Can be called again."""
        group, self._group = self._group, None  # Gloo closes its connections with the last reference
        if group is not None and self._is_registered:
            dist.destroy_process_group(group)
        elif group is not None:
            group.abort()  # NCCL's destructor would wait for graphs that have recorded its operations

    def _broadcast(self, x: Tensor, timeout: timedelta | None = None) -> None:
        options = dist.BroadcastOptions()
        options.timeout = timeout or self._timeout
        self._wait(lambda: self._group.broadcast([x], options), options.timeout)

    def _wait(self, start: Any, timeout: timedelta | None = None, *, is_queued: bool = False) -> None:
        """Start an operation and wait for its end. Raises `EngineDead` if a rank is gone or too slow.

        `is_queued`: the operation is part of the current stream, so that a graph can record it, and the host goes on.
        """
        if self._group is None:
            raise EngineDead(f"rank {self.rank} of {self.size} has left the engine")
        try:
            work = start()
            if not is_queued:
                work.wait(timeout or self._timeout)
            elif work is not None:  # not of a trainer's group
                work.wait()
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EngineDead(f"rank {self.rank} of {self.size} lost another rank: {reason}") from error


@dataclass(frozen=True, slots=True)
class Links:
    """One rank's groups. A group is used by one thread at a time."""

    commands: Group  # commands of rank 0, in main memory
    weights: Group  # weight updates, in main memory, beside running steps
    data: Group  # tensors of a step, on the executor's device

    @property
    def rank(self) -> int:
        return self.commands.rank

    @property
    def size(self) -> int:
        return self.commands.size

    def close(self, *, is_receiving: bool = False) -> None:
        """Leave all groups; other ranks that wait for this one get an error.

        `is_receiving`: a thread of this rank waits for weights. Its group ends with rank 0's, or with this process:
        torch would wait for the operation in progress.
        """
        self.commands.close()
        self.data.close()
        if not is_receiving:
            self.weights.close()


def local_links(directory: Path, rank: int, size: int, device: torch.device, wait: timedelta = WAIT) -> Links:
    """Join the other ranks on this machine, which use the same empty private directory.

    `wait` limits every later operation. Raises `EngineDead` if the ranks do not come within `JOIN_S` seconds.
    """
    store = dist.FileStore(str(directory / "store"), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=JOIN_S))
    groups: list[Any] = []
    try:
        for name in ("commands", "weights", "data"):
            meeting = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
            if name == "data" and device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = wait
                groups.append(dist.ProcessGroupNCCL(meeting, rank, size, options))
                continue
            # torch has no public name for the choice of the interface: loopback only
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = wait
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            groups.append(dist.ProcessGroupGloo(meeting, rank, size, options))
    except RuntimeError as error:
        raise EngineDead(f"rank {rank} of {size} found no other ranks within {JOIN_S:g} seconds") from error
    return _links(groups, rank, size, wait, is_registered=False)


def trainer_links(size: int, device: torch.device) -> Links:
    """Return this process's links inside a trainer, whose default process group must exist.

    Consecutive ranks of the default group form one engine. Every rank calls this, because all of them take part in
    creating each group. Raises `ValueError` if `size` does not divide their number.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % size:
        raise ValueError(f"tensor_parallel: {size} does not divide the {world} ranks of the process group")
    backends = ("gloo", "gloo", "nccl" if device.type == "cuda" else "gloo")
    own: list[Any] = []
    for first in range(0, world, size):
        members = list(range(first, first + size))
        groups = [dist.new_group(members, timeout=WAIT, backend=backend) for backend in backends]
        own = groups if rank in members else own
    return _links(own, rank % size, size, WAIT, is_registered=True)


def _links(groups: list[Any], rank: int, size: int, wait: timedelta, *, is_registered: bool) -> Links:
    commands, weights, data = groups
    return Links(
        Group(commands, rank, size, wait, is_registered=is_registered),
        Group(weights, rank, size, wait, is_registered=is_registered, idle=_IDLE),
        Group(data, rank, size, wait, is_registered=is_registered),
    )
