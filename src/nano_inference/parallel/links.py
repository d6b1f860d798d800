"""`Links`: the process groups through which the ranks of one engine communicate."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nano_inference.parallel.group import Group
from nano_inference.types import EngineDead

JOIN_S = 60.0  # longest wait for the other ranks when the groups are formed
WAIT = timedelta(seconds=600)
"""Longest wait of an operation for another rank that is alive; the loss of a process is seen at once."""
_IDLE = timedelta(days=365)  # longest wait of a rank for the next update. Lost ranks are found by the commands.


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
    try:
        groups = {
            name: _gloo(dist.PrefixStore(name, store), rank, size, wait)  # type: ignore[attr-defined]
            for name in ("commands", "weights", "data")
            if name != "data" or device.type == "cpu"
        }
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            meeting = dist.PrefixStore("data", store)  # type: ignore[attr-defined]
            groups["data"] = dist.ProcessGroupNCCL(meeting, rank, size, options)
    except RuntimeError as error:
        raise EngineDead(f"rank {rank} of {size} found no other ranks within {JOIN_S:g} seconds") from error
    return _links((groups["commands"], groups["weights"], groups["data"]), rank, size, wait, is_registered=False)


def _links(groups: tuple[Any, Any, Any], rank: int, size: int, wait: timedelta, *, is_registered: bool) -> Links:
    """Return the links through three torch process groups, in the order of the fields."""
    commands, weights, data = groups
    return Links(
        Group(commands, rank, size, wait, is_registered=is_registered),
        Group(weights, rank, size, wait, idle=_IDLE, is_registered=is_registered),
        Group(data, rank, size, wait, is_registered=is_registered),
    )


def trainer_links(size: int, device: torch.device) -> Links:
    """Return this process's links inside a trainer, whose default process group must exist.

    Consecutive ranks of the default group form one engine. Every rank calls this, because all of them take part in
    creating each group. Raises `ValueError` if `size` does not divide their number.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % size:
        raise ValueError(f"tensor_parallel: {size} does not divide the {world} ranks of the process group")
    own: Links | None = None
    for first in range(0, world, size):
        members = list(range(first, first + size))
        commands = dist.new_group(members, timeout=WAIT, backend="gloo")
        weights = dist.new_group(members, timeout=WAIT, backend="gloo")
        backend = "nccl" if device.type == "cuda" else "gloo"
        data = dist.new_group(members, timeout=WAIT, backend=backend)
        if rank in members:
            own = _links((commands, weights, data), rank - first, size, WAIT, is_registered=True)
    assert own is not None
    return own


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group that listens on the loopback interface only."""
    # torch has no public name for the choice of the interface
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)
