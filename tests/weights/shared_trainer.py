"""A trainer process that shares tensors as SGLang's trainers do: ForkingPickler and base64, in a process of its own."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from tests.weights.names import importable_as
from tests.weights.plain_trainer import PROCESSES

BUCKETS = "sglang.srt.weight_sync.tensor_bucket"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


@dataclass
class FlattenedTensorMetadata:
    """The fields of SGLang's class, under whose name it is pickled."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    """The field of SGLang's class, under whose name it is pickled."""

    values: list[bytes]


def pickled(value: Any) -> bytes:
    """Return what SGLang's MultiprocessingSerializer returns."""
    file = io.BytesIO()
    ForkingPickler(file).dump(value)
    return file.getvalue()


def bucket(named: Sequence[tuple[str, torch.Tensor]], *, in_bytes: bool) -> dict[str, Any]:
    """Return a flattened bucket: of bytes, as current versions make it, or of values of one dtype."""
    found, start, pieces = [], 0, []
    for name, tensor in named:
        piece = tensor.flatten().view(torch.uint8) if in_bytes else tensor.flatten()
        end = start + piece.numel()
        found.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, piece.numel()))
        pieces.append(piece)
        start = end
    return {"flattened_tensor": torch.cat(pieces), "metadata": found}


def value_of(form: str, pairs: list[tuple[str, torch.Tensor]]) -> Any:
    """Return what a trainer serializes."""
    if form == "parameters":
        return [(name, torch.nn.Parameter(tensor)) for name, tensor in pairs]
    if form == "adapter":
        return dict(pairs)
    if form == "tied":
        ((name, tensor),) = pairs
        return [(name, tensor), (f"{name}.tied", tensor)]
    if form in ("local", "two-ranks"):
        count = 1 if form == "local" else 2
        return [(name, LocalSerializedTensor([pickled(tensor)] * count)) for name, tensor in pairs]
    return bucket(pairs, in_bytes=form == "bytes") if form in ("bytes", "values") else pairs


def run_trainer(orders: Connection, path: Path, strategy: str, device: str) -> None:
    """Run the trainer process: answer a form and names with what they serialize to; `drop` frees what was sent."""
    torch.multiprocessing.set_sharing_strategy(strategy)
    named = torch.load(path)
    kept: list[Any] = []
    with (
        importable_as(BUCKETS, FlattenedTensorMetadata),
        importable_as(UPDATER, LocalSerializedTensor),
        suppress(EOFError),
    ):
        while True:
            form, *names = orders.recv()
            if form == "drop":
                kept.clear()
                orders.send("dropped")
                continue
            kept.append([(name, named[name].to(device, copy=True)) for name in names or named])
            kept.append(value_of(form, kept[-1]))
            orders.send(base64.b64encode(pickled(kept[-1])).decode())


class SharedTrainer:
    """Controls the process."""

    def __init__(self, orders: Connection, process: Any) -> None:
        self._orders = orders
        self._process = process

    def serialize(self, form: str, *names: str) -> str:
        """Return the named tensors, or all, in base64."""
        return self._ask(form, *names)

    def files(self) -> set[str]:
        """Return the names of its shared files that exist."""
        return {one.name for one in Path("/dev/shm").glob(f"torch_{self._process.pid}_*")}

    def drop(self) -> None:
        """Free all tensors that were serialized."""
        assert self._ask("drop") == "dropped"

    def stop(self) -> None:
        """End the process and wait until torch's manager has deleted its files."""
        self._process.kill()
        self._process.join(30)
        deadline = time.monotonic() + 30
        while self.files():
            assert time.monotonic() < deadline, "the trainer's files were not deleted"

    def _ask(self, *words: str) -> str:
        self._orders.send(words)
        assert self._orders.poll(60), "the trainer does not answer"
        answer: str = self._orders.recv()
        return answer


@contextmanager
def shared_trainer(
    named: dict[str, torch.Tensor], folder: Path, strategy: str = "file_system", device: str = "cpu"
) -> Iterator[SharedTrainer]:
    """Run a trainer with these tensors during the block."""
    path = folder / f"shared-{strategy}.pt"
    torch.save(named, path)
    ours, theirs = Pipe()
    process = PROCESSES.Process(target=run_trainer, args=(theirs, path, strategy, device), daemon=True)
    process.start()
    theirs.close()
    try:
        yield SharedTrainer(ours, process)
    finally:
        ours.close()
        process.join(30)
