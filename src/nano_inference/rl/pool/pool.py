"""`RolloutPool`: several engines with the interface of one."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from nano_inference.core.admission import checked, requests_for, scoring_requests, texts_of
from nano_inference.core.seeds import derive_seed
from nano_inference.rl.pool.adapters import load_adapter
from nano_inference.rl.pool.members import Members
from nano_inference.rl.pool.updates import Updates
from nano_inference.rl.pool.worker import Fleet, Job, WorkerFacts
from nano_inference.support.checks import check_bool, check_int, token_ids, unit_vector
from nano_inference.support.files import path_of
from nano_inference.types import (
    PAUSE_MODES,
    BadRequest,
    Delta,
    EngineDead,
    EngineRequest,
    Matcher,
    MatcherFactory,
    OnAdapter,
    OnRunning,
    PauseMode,
    Pooling,
    SamplingParams,
    TokenProgram,
    TrainingSample,
    WeightError,
    WeightInfo,
    WeightLabel,
)
from nano_inference.weights.staging import pairs, plain_tensor
from nano_inference.weights.updates import AdapterLoad, NamedWeights, WeightUpdate

Result = TypeVar("Result")


class RolloutPool:
    """Owns the workers that a fleet opens, and the event loop that they are called on. A context manager.

        with RolloutPool(RayFleet(config, 2), seed=0) as pool:
            samples = pool.generate(prompts, params, 8)

    Results are those of one engine with the same seed: the seed of each request is the pool's, numbered over all
    workers, so neither routing nor a worker's death changes a token. One worker computes all samples of a prompt. Any
    thread may call; `update_weights` does not wait for a `generate` of another thread. After a worker's death a new one
    gets the weights in force, and its unfinished requests start again.
    """

    def __init__(self, fleet: Fleet, *, seed: int | None = None, lineage: str | None = None) -> None:
        """Open the workers. `seed` is for requests without one (None: fresh entropy), as `EngineConfig.seed`.

        `lineage` is that of all samples, see `TrainingSample.lineage`; the default is random. Raises what opening a
        worker raises.
        """
        self.lineage = lineage or secrets.token_hex(8)
        self._seed = seed
        self._next_job = self._num_loads = 0
        self._loop = LoopThread()
        self._members = Members(fleet, self.lineage)
        self._updates = Updates(self._members)
        try:
            self._loop.run(self._members.open())
        except BaseException:
            self._loop.stop()
            raise
        self._is_closed = False
        self._limits = self._members.limits

    def shutdown(self) -> None:
        """Abort all requests and close all workers; later calls raise `EngineDead`. Can be called twice."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._loop.run(self._members.close())
            finally:
                self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        program: TokenProgram | None = None,
        adapter: str | None = None,
        sessions: Seq[str] | None = None,
    ) -> list[TrainingSample]:
        """Return n samples of each prompt, as `InferenceEngine.generate` does; waits while the pool is paused.

        `sessions` names for each prompt the conversation that it continues, whose prefix one worker has cached. Raises
        `BadRequest` before anything runs, and `EngineDead` if no worker is left.
        """
        requests = requests_for(prompts, sampling_params, num_samples_per_prompt, program, adapter)
        if sessions is not None and len(sessions) != len(requests):
            raise BadRequest("sessions", f"{len(sessions)} given for {len(requests)} prompts")
        return [sample for samples in self._run_all(requests, sessions) for sample in samples]

    def stream(
        self,
        prompt: Seq[int],
        sampling_params: SamplingParams | None = None,
        num_samples_per_prompt: int = 1,
        *,
        adapter: str | None = None,
        session: str | None = None,
    ) -> PoolStream:
        """Return an iterator of a prompt's deltas, which starts at the first `next`; closing it aborts the samples."""
        params = sampling_params or SamplingParams()
        request = EngineRequest(prompt=prompt, params=params, num_samples=num_samples_per_prompt, adapter=adapter)
        request = replace(request, is_streamed=True)
        (job,) = self._run(self._jobs([request]))
        return PoolStream(self._loop, self._members.stream(job, session))

    def score(
        self,
        token_ids: Seq[int] | Seq[Seq[int]],
        start: int | Seq[int] = 0,
        *,
        temperature: float = 1.0,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        adapter: str | None = None,
    ) -> list[float] | list[list[float]]:
        """Return log-probabilities of the texts' tokens, as `InferenceEngine.score` does."""
        texts, single = texts_of(token_ids)
        requests = scoring_requests(texts, start, temperature, params, adapter)
        scores = [list(sample.prompt_logprobs or ()) for sample in self._read_all(requests)]
        return scores[0] if single else scores

    def embed(
        self,
        token_ids: Seq[int] | Seq[Seq[int]],
        pooling: Pooling = "mean",
        *,
        normalize: bool = False,
        adapter: str | None = None,
    ) -> list[float] | list[list[float]]:
        """Return the embedding of each text, as `InferenceEngine.embed` does."""
        texts, single = texts_of(token_ids)
        check_bool("normalize", normalize)
        if pooling is None:
            raise BadRequest("pooling", "must be one of mean, last, got None")
        params = SamplingParams(max_tokens=0, pooling=pooling)
        samples = self._read_all([EngineRequest(prompt=ids, params=params, adapter=adapter) for ids in texts])
        found = [sample.embedding or () for sample in samples]
        embeddings = [list(unit_vector(one) if normalize else one) for one in found]
        return embeddings[0] if single else embeddings

    def abort(self, request_ids: int | Iterable[int]) -> None:
        """End requests now: the calls that wait for them return unfinished samples. Ignores ended and unknown ids.

        Ids are in the pool's deltas and samples, and count its requests from 0.
        """
        ids = [request_ids] if isinstance(request_ids, int) else list(request_ids)
        self._run(self._members.each("abort", ids))

    def abort_all(self) -> None:
        """End every request now, as `abort` does."""
        self._run(self._members.each("abort", None))

    # ---- control ----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        """Pause all workers, as `InferenceEngine.pause` does; requests wait for `resume` on another thread."""
        if mode not in PAUSE_MODES:
            raise BadRequest("mode", f"must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        check_bool("clear_cache", clear_cache)
        self._run(self._members.pause(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        """Allow steps again in all workers."""
        self._run(self._members.resume())

    def flush_cache(self) -> int:
        """Forget all cached prefixes; return the number of blocks freed in all workers."""
        return sum(self._run(self._members.each("flush")).values())

    def facts(self) -> dict[str, WorkerFacts]:
        """Return the counters of each worker by its name; replaces workers that have died."""
        return self._run(self._members.each("facts"))

    @property
    def num_replaced(self) -> int:
        """Number of workers that died and were replaced."""
        return self._members.num_replaced

    # ---- weights ----------------------------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: NamedWeights | str | Path,
        *,
        blocking: bool = False,
        on_running: OnRunning | None = None,
        version: WeightLabel | None = None,
        partial: bool = False,
        allow_nonfinite: bool = False,
        checksum: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Replace the weights of all workers or of none; return the version that they get, which the pool counts.

        Every worker gathers and checks the new weights while its requests continue; only when all have succeeded does
        each install them. An error names the worker and leaves the old weights everywhere. The arguments are those of
        `InferenceEngine.update_weights`. `weights` are a state dict or pairs, of which the pool stores a snapshot (Ray:
        once, in the object store), a directory that all workers can read and that stays as it is while the weights are
        in force, or `WeightGroup.receive()`, which this process receives for all workers; a worker does not join a
        group itself. Workers at URLs take directories only.
        """
        check_bool("blocking", blocking)
        update = WeightUpdate(
            weights=weights,
            on_running=("recompute" if blocking else "keep") if on_running is None else on_running,
            label=version,
            partial=partial,
            allow_nonfinite=allow_nonfinite,
            checksum=checksum,
            timeout=timeout,
            hold=True,
        )
        self._require_open()
        held = replace(update, weights=self._members.shared(weights))
        try:
            number = self._run(self._updates.start(held))
            return self.finish_update() if blocking else number
        except KeyboardInterrupt:
            self.cancel_update()
            raise

    def finish_update(self, timeout: float | None = None) -> int:
        """Wait for the update in progress; return the installed version. Raises `WeightError` and `TimeoutError`."""
        return self._run(self._updates.finish(timeout))

    def cancel_update(self) -> bool:
        """Cancel an update that no worker has started to install; return whether there was one."""
        return self._run(self._updates.cancel())

    def get_weight_version(self) -> int:
        """Return the number of weight installations of the pool."""
        return self._members.version

    def weight_info(self) -> WeightInfo:
        """Return the pool's version, its label, and the state of the latest update."""
        members = self._members
        return WeightInfo(
            members.version, members.labels.get(members.version), "staging" if self._updates.is_running else "idle"
        )

    def weights_checksum(self) -> str:
        """Return `weights_checksum` of the installed weights. Raises `WeightError` if the workers disagree."""
        found: dict[str, str] = self._run(self._members.each("checksum"))
        if len(set(found.values())) > 1:
            raise WeightError(f"the workers have different weights: {', '.join(f'{n} {c}' for n, c in found.items())}")
        return next(iter(found.values()))

    # ---- adapters ---------------------------------------------------------------------------------------------------

    def load_adapter(
        self,
        name: str,
        source: NamedWeights | str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        version: WeightLabel | None = None,
        on_running: OnAdapter = "keep",
    ) -> WeightLabel:
        """Load an adapter into all workers or none, as `InferenceEngine.load_adapter`; not into workers at URLs.

        The default `version` counts the pool's loads. All workers must be able to read a directory, as it is now, while
        the adapter is loaded.
        """
        self._num_loads += 1
        load = AdapterLoad(
            name=name,
            source=source,
            config=config,
            version=self._num_loads if version is None else version,
            on_running=on_running,
        )
        if isinstance(source, str | Path):
            load = replace(load, source=path_of(source, "source").absolute())
        else:  # adapters are small: every worker gets its own copy
            load = replace(load, source=[(str(n), plain_tensor(str(n), one).cpu().clone()) for n, one in pairs(source)])
        self._run(load_adapter(self._members, load))
        assert load.version is not None
        return load.version

    def unload_adapter(self, name: str) -> bool:
        """Forget an adapter in all workers; return whether the pool had loaded it."""
        was_loaded = self._members.adapters.pop(name, None) is not None
        self._run(self._members.each("unload_adapter", name))
        return was_loaded

    # ---- running ----------------------------------------------------------------------------------------------------

    async def _jobs(self, requests: Seq[EngineRequest]) -> list[Job]:
        """Number requests and give each its seed. Raises `BadRequest` naming the first invalid field."""
        for request in requests:
            if request.adapter is not None and request.adapter not in self._members.adapters:
                known = ", ".join(sorted(self._members.adapters)) or "none"
                raise BadRequest(
                    "adapter", f"the pool has not loaded {request.adapter!r}, or it was evicted; loaded: {known}"
                )
            if self._limits is None:  # only the workers know them: check what routing needs
                token_ids("prompt", request.prompt)
                check_int("num_samples", request.num_samples, 1)
            else:
                checked(request, self._limits, _unused_stops)
        first, self._next_job = self._next_job, self._next_job + len(requests)
        jobs = []
        for number, request in enumerate(requests, start=first):
            params = request.params
            if params.seed is None:
                seed = secrets.randbits(64) if self._seed is None else derive_seed(self._seed, number)
                request = replace(request, params=replace(params, seed=seed))
            jobs.append(Job(id=number, request=request))
        return jobs

    def _run_all(self, requests: Seq[EngineRequest], sessions: Seq[str] | None) -> list[list[TrainingSample]]:
        async def run() -> list[list[TrainingSample]]:
            jobs = await self._jobs(requests)
            names: Seq[str | None] = [None] * len(jobs) if sessions is None else sessions
            work = (self._members.generate(job, name) for job, name in zip(jobs, names, strict=True))
            tasks = [asyncio.ensure_future(one) for one in work]
            try:
                return await asyncio.gather(*tasks)
            except BaseException:  # one has failed: end the others first
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

        return self._run(run())

    def _read_all(self, requests: Seq[EngineRequest]) -> list[TrainingSample]:
        """Run requests that score or embed. Raises `ValueError` naming the first that was aborted."""
        samples = [sample for samples in self._run_all(requests, None) for sample in samples]
        for index, sample in enumerate(samples):
            if sample.finish_reason == "abort":
                raise ValueError(f"token_ids[{index}]: {sample.stop_reason or 'the request was aborted'}")
        return samples

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._is_closed:
            work.close()
        self._require_open()
        return self._loop.run(work)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDead("the pool was shut down")


class PoolStream(Iterator[Delta]):
    """Owns a streamed job, which ends when the stream is closed or exhausted."""

    def __init__(self, loop: LoopThread, deltas: AsyncGenerator[Delta]) -> None:
        self._loop = loop
        self._deltas = deltas
        self._is_closed = False

    def __next__(self) -> Delta:
        if self._is_closed:
            raise StopIteration
        try:
            delta = self._loop.run(_next(self._deltas))
        except BaseException:
            self._is_closed = True
            raise
        if delta is None:
            self._is_closed = True
            raise StopIteration
        return delta

    def close(self) -> None:
        """Abort the samples unless they have ended. Can be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run(self._deltas.aclose())


async def _next(deltas: AsyncGenerator[Delta]) -> Delta | None:
    """Return the next delta; None at the end."""
    return await anext(deltas, None)


def _unused_stops(texts: tuple[str, ...]) -> MatcherFactory:
    """Stand in for the workers' matchers of stop strings while a request is checked."""

    def make() -> Matcher:
        raise AssertionError("the pool runs no matcher")

    return make


Answer = TypeVar("Answer")
_STOP_S = 10.0


class LoopThread:
    """Owns the thread and its loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Return what a coroutine returns on the loop. An interrupt of the calling thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread, cancelling what runs there. Can be called twice."""
        if self._loop.is_closed():
            return

        async def cancel_others() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
