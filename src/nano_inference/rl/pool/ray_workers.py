"""`RayFleet`: each worker is a Ray actor with an engine on a thread, so an update never waits for a `generate`.

Ray is imported in functions: it is an extra.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.core.admission import Limits
from nano_inference.engine import InferenceEngine
from nano_inference.executors.staging import dtype_name
from nano_inference.loading.pieces import DTYPES
from nano_inference.rl.pool.local import LocalWorker, uncovered
from nano_inference.rl.pool.worker import Command, Job, WorkerDied
from nano_inference.support.checks import check_int, check_number
from nano_inference.support.packages import MissingPackage, ray_address
from nano_inference.types import Delta, TrainingSample
from nano_inference.weights.staging import checked_name, plain_tensor
from nano_inference.weights.updates import WeightUpdate

_MOST_CALLS = 100_000  # calls of one actor at the same time: a batch of rollouts waits in it for the engine


class SharedTensor(NamedTuple):
    """A tensor's bytes as Ray's object store keeps them: processes of a node read them without a copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


def to_shared(name: object, value: object) -> SharedTensor:
    """Return a tensor's name, type, shape and bytes. Raises `WeightError` for another object or an unknown dtype."""
    tensor = plain_tensor(checked_name(name), value).cpu().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return SharedTensor(str(name), dtype_name(tensor), tuple(tensor.shape), data.copy())


def from_shared(shared: Iterable[SharedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor); only one tensor at a time is copied out of the object store."""
    for name, dtype, shape, data in shared:
        yield name, torch.from_numpy(data.copy()).view(DTYPES[dtype]).reshape(shape)


class EngineActor(LocalWorker):
    """A `LocalWorker` in a Ray process."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        super().__init__(name, lambda: InferenceEngine(config))

    async def stage(self, update: WeightUpdate) -> int:
        if not isinstance(update.weights, Path):
            shared: Any = update.weights  # a reference, which Ray does not resolve inside a record
            update = replace(update, weights=from_shared(await shared))
        return await super().stage(update)


class RayWorker:
    """Owns an actor; see `Worker`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.limits: Limits | None = None
        self.first_version = 0
        self._actor = actor
        self._ray = require_ray()

    async def open(self, timeout: float) -> None:
        """Wait until the engine is open. Raises `WorkerDied` after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                self.limits = await self._answer(self._actor.open.remote())
        except TimeoutError:
            raise WorkerDied(f"{self.name}: did not start within {timeout:g} s; has Ray the CPUs and GPUs?") from None

    async def generate(self, job: Job) -> list[TrainingSample]:
        samples: list[TrainingSample] = await self._answer(self._actor.generate.remote(job))
        return samples

    async def stream(self, job: Job) -> AsyncGenerator[Delta]:
        deltas = self._actor.stream.options(num_returns="streaming").remote(job)
        try:
            async for one in deltas:
                yield await self._answer(one)
        except self._ray.exceptions.RayActorError as error:
            raise self._died(error) from None
        finally:
            self._ray.cancel(deltas)

    async def call(self, command: Command, *args: Any) -> Any:
        return await self._answer(getattr(self._actor, command).remote(*args))

    async def close(self) -> None:
        self._ray.kill(self._actor, no_restart=True)

    async def _answer(self, asked: Any) -> Any:
        """Return what an actor's method returned, or raise what it raised. Cancelling the call cancels the method."""
        exceptions = self._ray.exceptions
        try:
            return await asked
        except exceptions.RayActorError as error:
            raise self._died(error) from None
        except exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except asyncio.CancelledError:
            self._ray.cancel(asked)
            raise

    def _died(self, error: Exception) -> WorkerDied:
        return WorkerDied(f"{self.name}: the actor died ({type(error).__name__})")


class RayFleet:
    """Opens engines as Ray actors, in the cluster that this process has joined, else in the one that RAY_ADDRESS names.

    Without either, it starts a Ray of its own on this machine.
    """

    retry_s = 10.0

    def __init__(
        self,
        config: EngineConfig,
        size: int,
        *,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        open_timeout: float = 600.0,
    ) -> None:
        """Each actor reserves `num_cpus` and `num_gpus` and opens `config`, whose paths all nodes must have.

        `open_timeout`, in seconds, includes the wait for free CPUs and GPUs. Raises `MissingPackage` without Ray.
        """
        check_int("size", size, 1)
        check_number("num_cpus", num_cpus, 0, 1e6)
        check_number("num_gpus", num_gpus, 0, 1e6)
        check_number("open_timeout", open_timeout, 0, 1e9)
        self.size = size
        self._config = config
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._timeout = open_timeout
        self._ray = require_ray()
        self._owns_cluster = not self._ray.is_initialized()
        if self._owns_cluster:
            self._ray.init(address=ray_address())

    def share(self, named: Iterable[tuple[object, object]]) -> Any:
        """Put the tensors in the object store, once; return their reference."""
        return self._ray.put([to_shared(name, value) for name, value in named])

    def uncovered(self, older: Any, newer: Any) -> Any | None:
        return uncovered(older, newer, self._ray.get, self._ray.put)

    async def open(self, index: int) -> RayWorker:
        name = f"worker {index}"
        remote = self._ray.remote(max_restarts=0, max_concurrency=_MOST_CALLS, **self._resources)(EngineActor)
        worker = RayWorker(name, remote.remote(name, self._config))
        try:
            await worker.open(self._timeout)
        except BaseException:
            await worker.close()
            raise
        return worker

    async def close(self) -> None:
        """Leave the cluster if this fleet joined it."""
        if self._owns_cluster:
            await asyncio.to_thread(self._ray.shutdown)


def require_ray() -> Any:
    """Return the module `ray`. Raises `MissingPackage`."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackage("a pool of Ray actors needs Ray: pip install 'nano-inference[ray]'") from error
    return ray
