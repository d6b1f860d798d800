"""What a pool needs from one engine: `Worker`, the records it passes, and `Fleet`, which opens workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nano_inference.core.admission import Limits
from nano_inference.types import Delta, EngineDead, EngineRequest, TrainingSample


class WorkerDied(EngineDead):
    """A worker does not answer any more; its jobs are resubmitted. The message names the worker and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of the pool; its seed is set, so that its tokens do not depend on the worker."""

    id: int  # unique in the pool
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """State of one worker."""

    num_computed: int = 0  # tokens computed by the model since the start
    num_sampled: int = 0
    version: int = 0  # number of weight installations since its start
    pid: int = 0  # the engine's process; 0 if unknown


AdapterCommand = Literal["stage_adapter", "install_adapter", "unload_adapter"]
Command = (
    Literal["stage", "commit", "discard", "pause", "resume", "abort", "flush", "checksum", "facts"] | AdapterCommand
)


class Worker(Protocol):
    """One engine. Every method raises `WorkerDied` if the engine is gone; all run on the pool's event loop."""

    name: str  # for messages: where the engine is
    limits: Limits | None  # limits of its requests; None if unknown
    first_version: int  # its number of the weights that it opened with

    async def generate(self, job: Job) -> list[TrainingSample]:
        """Return the job's samples in order. Cancelling the call aborts them. Raises `BadRequest`."""

    def stream(self, job: Job) -> AsyncGenerator[Delta]:
        """Yield the job's deltas; closing the iterator aborts its samples. Raises `BadRequest`."""

    async def call(self, command: Command, *args: Any) -> Any:
        """Return what the method of `local.LocalWorker` with this name returns. Raises `WeightError`, `UpdateBusy`."""

    async def close(self) -> None:
        """Shut the engine down. Does not raise `WorkerDied`."""


class Fleet(Protocol):
    """Opens the workers of one pool."""

    size: int  # number of workers
    retry_s: float  # seconds between attempts to open a worker in the place of a dead one

    def share(self, named: Iterable[tuple[object, object]]) -> Any:
        """Return a snapshot of (name, tensor) pairs as `WeightUpdate.weights`, stored once for all workers.

        A tensor need only be valid until the next is requested. Raises `WeightError`.
        """

    def uncovered(self, older: Any, newer: Any) -> Any | None:
        """Return `older`, a `WeightUpdate.weights`, without tensors that `newer` has too; None if none is left.

        A fleet that cannot divide `older` returns it whole. Raises if a directory cannot be read.
        """

    async def open(self, index: int) -> Worker:
        """Open the worker with this index, also in place of a dead one. Raises `WorkerDied`, `ModelError`."""

    async def close(self) -> None:
        """Free what the fleet owns; its workers are closed already."""
