"""A trainer process for plain groups: uses torch only, like SGLang-style trainers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.weights.broadcast_forms import dict_arrays

Named = dict[str, torch.Tensor]
PATIENCE = timedelta(seconds=60)
PROCESSES = multiprocessing.get_context("forkserver")
"""Forks trainers from a process that has only imported the slow modules."""
PROCESSES.set_forkserver_preload(["torch.distributed", "transformers", "nano_inference"])


def join(port: int, name: str, world_size: int) -> Any:
    """Host a store and create the group `name`, with this process as rank 0."""
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=PATIENCE))
    store.set_timeout(PATIENCE)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=PATIENCE
    )
    c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
    return group


def run_trainer(orders: Connection, path: Path) -> None:
    """Run the trainer process: execute commands in order and acknowledge each."""
    torch.set_num_threads(1)
    named: Named = torch.load(path)
    orders.send("up")
    group = None
    while True:
        order, *words = orders.recv()
        if order == "join":
            group = join(*words)
        elif order == "send":
            for name in words[0]:
                dist.broadcast(named[name], src=0, group=group)
        elif order == "pack":
            names, limit = words
            for bucket in packed([named[name] for name in names], limit):
                dist.broadcast(bucket, src=0, group=group)
        elif order == "dicts":
            for one in dict_arrays({name: named[name] for name in words[0]}):
                dist.broadcast(one, src=0, group=group)
        elif order == "end":
            return
        orders.send(order)


def packed(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[torch.Tensor]:
    """Yield arrays of bytes as vLLM's trainers send them: each ends with the tensor that makes it exceed the limit."""
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        pieces.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(len(piece) for piece in pieces) > limit:
            yield torch.cat(pieces)
            pieces = []
    if pieces:
        yield torch.cat(pieces)


class Trainer:
    """Controls a trainer process."""

    def __init__(self, orders: Connection, process: Any) -> None:
        self._orders = orders
        self._process = process

    def begin(self, order: str, *words: object) -> None:
        """Send a command without waiting for it."""
        self._orders.send((order, *words))

    def wait(self) -> None:
        """Wait until the last command is done."""
        assert self._orders.poll(60), "the trainer does not answer"
        self._orders.recv()

    def join(self, port: int, name: str, world_size: int = 2) -> None:
        """Create the group; does not wait."""
        self.begin("join", port, name, world_size)

    def send(self, names: Sequence[str]) -> None:
        """Broadcast tensors; does not wait."""
        self.begin("send", list(names))

    def pack(self, names: Sequence[str], limit: int) -> None:
        """Broadcast tensors in buckets; does not wait."""
        self.begin("pack", list(names), limit)

    def send_dicts(self, names: Sequence[str]) -> None:
        """Broadcast tensors as prime-rl does; does not wait."""
        self.begin("dicts", list(names))

    def die(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


@contextmanager
def trainer_process(named: Named, folder: Path) -> Iterator[Trainer]:
    """Run a trainer with these tensors during the block."""
    path = folder / "trainers.pt"
    torch.save(named, path)
    ours, theirs = multiprocessing.Pipe()
    process = PROCESSES.Process(target=run_trainer, args=(theirs, path), daemon=True)
    process.start()
    theirs.close()
    try:
        trainer = Trainer(ours, process)
        trainer.wait()  # until it has started, so that timeouts of tests do not include its start
        yield trainer
    finally:
        process.kill()
        process.join()


def dtypes_and_shapes(named: Named, names: Sequence[str], prefix: str = "") -> tuple[list[str], list[list[int]]]:
    """Return the dtypes and shapes that are announced before a broadcast."""
    dtypes = [prefix + str(named[name].dtype).removeprefix("torch.") for name in names]
    return dtypes, [list(named[name].shape) for name in names]
