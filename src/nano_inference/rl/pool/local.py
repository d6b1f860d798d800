"""`LocalWorker`: an engine on a thread of this process, for tests, one process, and inside a Ray actor."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from torch import Tensor

from nano_inference.async_engine import AsyncEngine, Turn
from nano_inference.core.admission import Limits
from nano_inference.core.outbox import Outbox
from nano_inference.engine import InferenceEngine
from nano_inference.rl.pool.worker import Command, Job, WorkerDied, WorkerFacts
from nano_inference.types import Delta, PauseMode, TrainingSample
from nano_inference.weights.adapters import StagedAdapter
from nano_inference.weights.directory import weights_in
from nano_inference.weights.staging import checked_name, plain_tensor
from nano_inference.weights.updates import AdapterLoad, WeightUpdate

OpenEngine = Callable[[int], InferenceEngine]  # opens a worker's engine by its index, on the engine's thread


class LocalWorker:
    """Owns an `AsyncEngine`; see `Worker`."""

    def __init__(self, name: str, open_engine: Callable[[], InferenceEngine]) -> None:
        self.name = name
        self.limits: Limits | None = None
        self.first_version = 0
        self._num_computed = self._num_sampled = 0
        self._engine = AsyncEngine(open_engine, observer=self, end_error=self._died)
        self._jobs: dict[int, Outbox] = {}  # open jobs
        self._staged: StagedAdapter | None = None

    async def open(self) -> Limits:
        """Open the engine; return the limits of its requests. Raises what its constructor raises."""
        self.limits = (await self._engine.start()).limits
        return self.limits

    async def generate(self, job: Job) -> list[TrainingSample]:
        found: dict[int, TrainingSample] = {}
        async with aclosing(self.stream(job)) as deltas:
            async for delta in deltas:
                if delta.sample is not None:
                    found[delta.sample_index] = delta.sample
        return [found[index] for index in sorted(found)]

    async def stream(self, job: Job) -> AsyncGenerator[Delta]:
        with self._engine.submit([job.request]) as outbox:
            self._jobs[job.id] = outbox
            try:
                while not outbox.is_done:
                    for _, delta in await outbox.take():
                        yield delta
            finally:
                if self._jobs.get(job.id) is outbox:
                    del self._jobs[job.id]

    async def call(self, command: Command, *args: Any) -> Any:
        return await getattr(self, command)(*args)

    # ---- commands ---------------------------------------------------------------------------------------------------

    async def stage(self, update: WeightUpdate) -> int:
        """Gather and check new weights, hold them, and return the version that they will get.

        Jobs continue with the old weights. Raises `WeightError`, `UpdateBusy`.
        """
        return await self._engine.update_weights(update) + 1

    async def commit(self) -> int:
        """Install the held weights; return their version."""
        return await self._engine.commit_update()

    async def discard(self) -> bool:
        """Drop weights that are not installed; return whether there were any."""
        return await self._engine.cancel_update()

    async def stage_adapter(self, load: AdapterLoad | None) -> None:
        """Read and pack an adapter, and hold it if it fits; None drops it. Raises as `AsyncEngine.load_adapter`."""
        self._staged = None if load is None else await self._engine.stage_adapter(load)

    async def install_adapter(self) -> list[str]:
        """Install the adapter that is held; return the names of all that are loaded now."""
        staged, self._staged = self._staged, None
        assert staged is not None, "staged before"
        await self._engine.call(lambda engine: engine.install_adapter(staged))
        return [info.name for info in await self._engine.adapters()]

    async def unload_adapter(self, name: str) -> bool:
        """Forget an adapter; return whether it was loaded."""
        return await self._engine.unload_adapter(name)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stop running steps, as `InferenceEngine.pause` does; return when the engine is paused."""
        await self._engine.pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Allow steps again."""
        await self._engine.resume()

    async def abort(self, job_ids: Collection[int] | None) -> None:
        """End these jobs (None: all) now; their samples end as "abort"."""
        wanted = self._jobs if job_ids is None else job_ids
        await self._engine.abort([self._jobs[one] for one in wanted if one in self._jobs])

    async def flush(self) -> int:
        """Forget all cached prefixes; return the number of blocks freed."""
        return await self._engine.call(lambda engine: engine.flush_cache())

    async def checksum(self) -> str:
        """Return `weights_checksum` of the installed weights."""
        return await self._engine.call(lambda engine: engine.weights_checksum())

    async def facts(self) -> WorkerFacts:
        """Return counters; the cheapest way to learn whether the engine lives."""
        version = await self._engine.call(lambda engine: engine.weight_info().version)
        computed, sampled = self._num_computed, self._num_sampled
        return WorkerFacts(num_computed=computed, num_sampled=sampled, version=version, pid=os.getpid())

    async def close(self) -> None:
        await self._engine.stop()

    def on_delta(self, outbox: Outbox, prompt_index: int, delta: Delta, last_token: float | None) -> None:
        """Ignored."""

    def on_turn(self, turn: Turn) -> None:
        """Add up the steps."""
        self._num_computed += turn.result.stats.num_computed
        self._num_sampled += turn.result.stats.num_sampled

    def on_death(self, error: BaseException) -> None:
        """Ignored: the next call of the worker raises."""

    def _died(self, cause: BaseException | None) -> Exception:
        reason = "the engine was stopped" if cause is None else f"{type(cause).__name__}: {cause}"
        error = WorkerDied(f"{self.name}: {reason}")
        error.__cause__ = cause
        return error


class LocalFleet:
    """Opens engines on threads of this process; `open_engine` gets the worker's index."""

    retry_s = 10.0

    def __init__(self, open_engine: OpenEngine, size: int) -> None:
        self.size = size
        self._open_engine = open_engine

    def share(self, named: Iterable[tuple[object, object]]) -> list[tuple[str, Tensor]]:
        """Return copies, so that the trainer may change its tensors."""
        return [(checked_name(name), plain_tensor(str(name), value).cpu().clone()) for name, value in named]

    def uncovered(self, older: Any, newer: Any) -> Any | None:
        return uncovered(older, newer, list, list)

    async def open(self, index: int) -> LocalWorker:
        worker = LocalWorker(f"worker {index}", lambda: self._open_engine(index))
        await worker.open()
        return worker

    async def close(self) -> None:
        """Owns nothing."""


def uncovered(older: Any, newer: Any, get: Callable[[Any], list[Any]], put: Callable[[list[Any]], Any]) -> Any | None:
    """Return `Fleet.uncovered`; `get` returns what `share` stored as tuples that begin with a name."""
    if isinstance(older, Path) and older == newer:
        return None
    names = {pair[0] for pair in (weights_in(newer) if isinstance(newer, Path) else get(newer))}
    found = list(weights_in(older)) if isinstance(older, Path) else get(older)
    left = [pair for pair in found if pair[0] not in names]
    if not left:
        return None
    return older if isinstance(older, Path) or len(left) == len(found) else put(left)
