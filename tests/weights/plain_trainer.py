"""A trainer process for plain groups: uses torch only, like SGLang-style trainers."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Named = dict[str, torch.Tensor]
PATIENCE = timedelta(seconds=60)
PROCESSES = multiprocessing.get_context("forkserver")
"""Forks trainers from a process that has only imported the slow modules."""
PROCESSES.set_forkserver_preload(["torch.distributed", "transformers", "nano_inference"])


Broadcast = Callable[[torch.Tensor], object]


def join(port: int, name: str, world_size: int) -> Broadcast:
    """Host a store, create the group `name` with this process as rank 0, and return its broadcast."""
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=PATIENCE))
    store.set_timeout(PATIENCE)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=PATIENCE
    )
    c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
    return partial(dist.broadcast, src=0, group=group)


def run_trainer(orders: Connection, path: Path, join_group: Callable[..., Broadcast]) -> None:
    """Run the trainer process: execute commands in order and acknowledge each."""
    torch.set_num_threads(1)
    named: Named = torch.load(path)
    orders.send("up")
    while True:
        order, *words = orders.recv()
        if order == "join":
            broadcast = join_group(*words)
        else:
            for one in arrays(named, order, *words):
                broadcast(one)
        orders.send(order)


def arrays(named: Named, order: str, what: Any, limit: int = 0) -> Iterator[torch.Tensor]:
    """Yield what a trainer broadcasts for a command."""
    if order == "describe":
        yield from (torch.tensor([1]), *described_by(what))
    elif order == "dicts":
        yield from dict_arrays({name: named[name] for name in what})
    else:
        tensors = [named[name] for name in what]
        yield from packed(tensors, limit) if order == "pack" else tensors


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


LAYERS = "model.layers."


def dict_arrays(named: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what prime-rl's trainer broadcasts: a state dict of the tensors outside of layers, and one per layer."""
    layers = sorted({name.split(".")[2] for name in named if name.startswith(LAYERS)}, key=int)
    places = [None, *layers]
    yield torch.tensor([len(places)])
    for place in places:
        part = {name: one for name, one in named.items() if layer_of(name) == place}
        kinds = list(dict.fromkeys(one.dtype for one in part.values()))
        groups = {kind: [(name, one) for name, one in part.items() if one.dtype == kind] for kind in kinds}
        described = {kind: [(name, one.shape, one.numel()) for name, one in group] for kind, group in groups.items()}
        yield from described_by(pickle.dumps(described))
        yield from (torch.cat([one.flatten() for _, one in group]) for group in groups.values())


def described_by(data: bytes) -> Iterator[torch.Tensor]:
    """Yield the number of bytes of a description, and the description."""
    yield torch.tensor([len(data)])
    yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def layer_of(name: str) -> str | None:
    """Return the number of a weight's layer, or None."""
    return name.split(".")[2] if name.startswith(LAYERS) else None


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

    def host(self, port: int, world_size: int = 2, value: bytes | None = None, device: str = "cpu") -> None:
        """Create the group as vLLM does; does not wait. With `value` only put that in place of the unique id."""
        self.begin("join", port, world_size, value, device)

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
def trainer_process(named: Named, folder: Path, join_group: Callable[..., Broadcast] = join) -> Iterator[Trainer]:
    """Run a trainer with these tensors during the block."""
    path = folder / "trainers.pt"
    torch.save(named, path)
    ours, theirs = multiprocessing.Pipe()
    process = PROCESSES.Process(target=run_trainer, args=(theirs, path, join_group), daemon=True)
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
