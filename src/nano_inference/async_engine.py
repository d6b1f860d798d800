"""`AsyncEngine`: `InferenceEngine` for asyncio, on a thread of its own.

The thread runs the commands in its inbox, then one step, in turns. What a step produced is posted to the event loop,
which puts it into its caller's `Outbox`. Nothing else is shared. An exception that escapes a turn ends the thread:
every waiter and every later call gets `EngineDead` with this exception as its cause.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from nano_inference.core.admission import requests_for, scoring_requests
from nano_inference.core.outbox import Outbox
from nano_inference.types import (
    AdapterInfo,
    BadRequest,
    Delta,
    EngineDead,
    EngineRequest,
    OnAdapter,
    OnRunning,
    PauseMode,
    SamplingParams,
    StepResult,
    TokenProgram,
    TrainingSample,
    UpdateBusy,
    UpdateCancelled,
    WeightInfo,
    WeightLabel,
)
from nano_inference.weights.updates import AdapterLoad, NamedWeights, WeightUpdate

if TYPE_CHECKING:
    from nano_inference.engine import InferenceEngine  # imports torch
    from nano_inference.weights.adapters import StagedAdapter

Answer = TypeVar("Answer")

_WATCHDOG_S = 1.0  # most seconds between two checks of the watchdog
_WATCH_S = 0.25
"""Seconds between two turns of an idle engine while something is watched: a silent source of weights may time out."""
_log = logging.getLogger(__name__)


DrivenEngine: TypeAlias = "InferenceEngine"
Engine = TypeVar("Engine", bound=DrivenEngine)


class Turn(NamedTuple):
    """One step; times are in seconds of the monotonic clock."""

    result: StepResult
    began: float
    ended: float
    is_halted: bool
    """Whether no further step can run before the engine is resumed or woken."""


class Observer(Protocol):
    """Receives events of the engine on the event loop. An exception here counts as a failure of the engine."""

    def on_delta(self, outbox: Outbox, prompt_index: int, delta: Delta, last_token: float | None) -> None:
        """A delta was put into its caller's outbox; `last_token`: time of the sample's last token before it."""

    def on_turn(self, turn: Turn) -> None:
        """A step's deltas have been delivered."""

    def on_death(self, error: BaseException) -> None:
        """The engine has failed."""


class AsyncEngine(Generic[Engine]):
    """Owns an engine and its thread. Call its methods on the event loop that started it.

        async with AsyncEngine(lambda: InferenceEngine(config)) as engine:
            samples = await engine.generate(prompts, params)
            async for delta in engine.stream(prompt, params): ...

    Cancelling a `generate` or closing a `stream` aborts its requests at the next step boundary. What has no method here
    is done by `call(lambda engine: ...)`.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        observer: Observer | None = None,
        step_timeout: float | None = None,
        end_error: Callable[[BaseException | None], Exception] | None = None,
    ) -> None:
        """`open_engine` is called on the thread. A turn of more than `step_timeout` seconds counts as a failure.

        `end_error` returns the exception for waiters at the engine's end, given the failure, or None if the engine was
        stopped; the default returns `EngineDead`.
        """
        self.failure: BaseException | None = None
        """The exception that ended the engine or prevented its opening."""
        self.step_timeout = step_timeout
        """Seconds; None is no limit."""
        self._open_engine = open_engine
        self._observer = observer
        self._end_error = end_error or _dead
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()  # commands for the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._outboxes: set[Outbox] = set()  # those of callers that have not left
        self._unanswered: set[asyncio.Future[Any]] = set()  # futures of `call` and `watch`
        self._num_pausing = 0  # calls that wait until the engine is paused
        self._busy_since: float | None = None
        """When the current work started; None while the thread waits. Written by the thread."""
        # Accessed only on the thread:
        self._queued: dict[int, tuple[Outbox, int]] = {}
        """Id of a request that was not collected -> its outbox and index there."""
        self._watches: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        """Future -> the function to call after every turn."""
        self._is_draining = False  # whether to end requests that cannot run
        self._is_ending = False
        self._num_overrides = 0  # commands that ended a waiting pause: resumes, and pauses with mode "keep"
        self._num_updates = 0  # updates that were started here; the number of each is its place
        self._failed_update: tuple[int, Exception] | None = None
        """The number and the error of the latest update that failed."""
        self._num_cancelled = 0  # the largest number of a cancelled update
        self._loading = asyncio.Lock()  # adapters are loaded and unloaded in the order of the calls

    # ---- start and stop ---------------------------------------------------------------------------------------------

    async def start(self) -> Engine:
        """Open the engine on its thread and return it. Raises what `open_engine` raised."""
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[Engine] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="engine", daemon=True)
        self._thread.start()
        try:
            engine = await opened
        except BaseException as error:
            if isinstance(error, Exception):
                self.failure = error
            else:  # a cancelled caller calls no `stop`
                self._is_stopped = True
                self._inbox.put(self._end)
            raise
        self._watchdog = self._loop.create_task(self._watch_thread(engine))
        return engine

    async def stop(self, timeout: float = 10.0) -> None:
        """Fail open requests, shut the engine down between two steps and end the thread.

        A thread that does not end within `timeout` seconds is abandoned.
        """
        self._is_stopped = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail_all(self._end_error(None))
        self._inbox.put(self._end)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drain(self) -> None:
        """From now on, end requests that cannot continue because the engine is paused, asleep or without weights."""
        self._inbox.put(self._drain)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_unanswered(self) -> int:
        """Number of calls and watches without an answer."""
        return len(self._unanswered)

    @property
    def num_commands(self) -> int:
        """Number of commands that wait for the thread."""
        return self._inbox.qsize()

    @property
    def num_watches(self) -> int:
        """Number of functions that the thread calls after every turn."""
        return len(self._watches)

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        program: TokenProgram | None = None,
        adapter: str | None = None,
    ) -> list[TrainingSample]:
        """Return n samples of each prompt, as `InferenceEngine.generate` does. Raises `BadRequest`, `EngineDead`."""
        return await self._samples(requests_for(prompts, sampling_params, num_samples_per_prompt, program, adapter))

    async def stream(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_samples_per_prompt: int = 1,
        *,
        program: TokenProgram | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one prompt's samples; closing the iterator aborts them."""
        request = EngineRequest(
            prompt=prompt,
            params=sampling_params or SamplingParams(),
            num_samples=num_samples_per_prompt,
            program=program,
            adapter=adapter,
            is_streamed=True,
        )
        with self.submit([request]) as outbox:
            while not outbox.is_done:
                for _, delta in await outbox.take():
                    yield delta

    async def score(
        self,
        token_ids: Sequence[int],
        start: int = 0,
        *,
        temperature: float = 1.0,
        params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> list[float]:
        """Return what `InferenceEngine.score` does for one text. Raises `EngineDead` too."""
        (sample,) = await self._samples(scoring_requests([token_ids], start, temperature, params, adapter))
        if sample.finish_reason == "abort":
            raise ValueError(f"token_ids: {sample.stop_reason or 'the request was aborted'}")
        return list(sample.prompt_logprobs or ())

    @contextmanager
    def submit(self, requests: Sequence[EngineRequest], *, later: bool = False) -> Iterator[Outbox]:
        """Queue requests, all or none, and yield their outbox; leaving the block aborts those that have not ended.

        With `later`, `enter` queues them. Raises `BadRequest` for a number of samples, and `EngineDead`; a request that
        is refused on the thread raises `BadRequest` in `Outbox.take`.
        """
        self._require_alive()
        for request in requests:
            if type(request.num_samples) is not int or request.num_samples < 1:
                raise BadRequest("num_samples", f"must be an integer >= 1, got {request.num_samples!r}")
        outbox = Outbox(requests)
        self._outboxes.add(outbox)
        if not later and requests:
            self.enter(outbox, range(len(requests)))
        try:
            yield outbox
        finally:
            outbox.close()
            self._outboxes.discard(outbox)
            self._inbox.put(lambda: self._collect(outbox))

    def enter(self, outbox: Outbox, indices: Sequence[int]) -> None:
        """Queue the requests with these indices, all or none."""
        self._inbox.put(lambda: self._add(outbox, indices))

    async def abort(
        self, outboxes: Collection[Outbox] | None = None, *, first: Callable[[Engine], object] | None = None
    ) -> int:
        """End the open requests of these callers, of all for None, as "abort"; return the number of samples.

        `first` runs just before, on the engine's thread: requests that are submitted later do not end.
        """
        wanted = tuple(self._outboxes if outboxes is None else outboxes)

        def end(engine: Engine) -> int:
            if first is not None:
                first(engine)
            return self._end_requests([one for outbox in wanted for one in outbox.ids])

        return await self.call(end)

    async def _samples(self, requests: Sequence[EngineRequest]) -> list[TrainingSample]:
        """Return the samples of requests, by request and sample."""
        found: dict[tuple[int, int], TrainingSample] = {}
        with self.submit(requests) as outbox:
            while not outbox.is_done:
                for index, delta in await outbox.take():
                    if delta.sample is not None:
                        found[index, delta.sample_index] = delta.sample
        return [found[place] for place in sorted(found)]

    # ---- pause and weights ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> bool:
        """Pause as `InferenceEngine.pause` does, with "wait" until the started requests have ended; return True.

        A call that waits returns False if another one resumes the engine or pauses it with "keep". Cancelling it
        cancels the pause, unless another call waits for it too.
        """
        overrides: list[int] = []

        def start(engine: Engine) -> None:
            self._num_overrides += engine.is_pausing and mode == "keep"
            overrides.append(self._num_overrides)
            engine.pause(mode, clear_cache=clear_cache, blocking=False)

        def look(engine: Engine) -> bool | None:
            if overrides[0] != self._num_overrides:
                return False
            return None if engine.is_pausing else engine.is_paused

        self._num_pausing += 1
        try:
            paused = await (await self.watch(look, first=start))
            return paused and await self.call(lambda engine: look(engine) is True)
        except asyncio.CancelledError:
            if self._num_pausing == 1:
                self._inbox.put(lambda: self._engine.cancel_pause())
            raise
        finally:
            self._num_pausing -= 1

    async def resume(self, *, first: Callable[[Engine], object] | None = None) -> None:
        """Resume after `pause`.

        `first` runs just before, on the engine's thread; if it returns False, nothing is resumed.
        """

        def resume(engine: Engine) -> None:
            if first is None or first(engine) is not False:
                self._num_overrides += 1
                engine.resume()

        await self.call(resume)

    async def update_weights(
        self,
        weights: WeightUpdate | NamedWeights | str | Path,
        *,
        on_running: OnRunning | None = None,
        version: WeightLabel | None = None,
        partial: bool = False,
        allow_nonfinite: bool = False,
        checksum: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Gather new weights between steps and install them; return the installed version.

        The arguments are those of `InferenceEngine.update_weights`, or one `WeightUpdate`. With its `hold`, returns
        when they are gathered: `commit_update` installs them, `cancel_update` drops them. Cancelling the call drops
        them too. Raises `WeightError`, `UpdateBusy`, `BadRequest` and `EngineDead`.
        """
        if not isinstance(weights, WeightUpdate):
            weights = WeightUpdate(
                weights=weights,
                on_running="keep" if on_running is None else on_running,
                label=version,
                partial=partial,
                allow_nonfinite=allow_nonfinite,
                checksum=checksum,
                timeout=timeout,
            )
        number: list[int] = []
        try:
            return (await (await self._started_update(weights, number))).version
        except asyncio.CancelledError:  # the thread may start the update after this
            self._inbox.put(lambda: number and self._cancel_update(number[0]))
            raise

    async def start_update(self, update: WeightUpdate) -> asyncio.Future[WeightInfo]:
        """Start to gather new weights; return the future of what is installed then, with `hold` of what is installed.

        The future raises `WeightError`, `UpdateCancelled` if it is cancelled. Raises `UpdateBusy` during another one.
        """
        return await self._started_update(update, [])

    async def _started_update(self, update: WeightUpdate, number: list[int]) -> asyncio.Future[WeightInfo]:
        """Do what `start_update` does; append the update's number once the thread has started it."""
        on_gathered = update.on_gathered

        def gathered() -> None:
            self.wake()
            if on_gathered is not None:
                on_gathered()

        update = replace(update, on_gathered=gathered)

        def start(engine: Engine) -> None:
            if engine.weight_info().update == "failed":  # its caller would get the end of the next one
                raise UpdateBusy("the last update has failed and its caller is being notified; try again")
            engine.start_update(update)
            self._num_updates += 1
            number.append(self._num_updates)

        ends = ("idle", "staged") if update.hold else ("idle",)
        return await self.watch(lambda engine: self._end_of_update(engine, number[0], ends), first=start)

    async def commit_update(self, *, version: int | None = None) -> int:
        """Install a held update, as its `on_running` says; return the installed version. Raises as `update_weights`.

        `version`: see `InferenceEngine.commit_update`.
        """
        number: list[int] = []

        def commit(engine: Engine) -> None:
            engine.commit_update(blocking=False, version=version)
            number.append(self._num_updates)

        installed = await self.watch(lambda engine: self._end_of_update(engine, number[0], ("idle",)), first=commit)
        return (await installed).version

    async def cancel_update(self) -> bool:
        """Cancel an update that is not installed yet, for its callers too; return whether there was one."""
        return await self.call(lambda _: self._cancel_update(self._num_updates))

    def _end_of_update(self, engine: Engine, number: int, ends: Collection[str]) -> WeightInfo | None:
        """Return what is installed once an update has reached one of these states. Raises `WeightError`.

        The engine raises an update's error once; here it is kept for all who wait for the update.
        """
        if number <= self._num_cancelled:
            raise UpdateCancelled("the update was cancelled")
        if self._failed_update is not None and self._failed_update[0] == number:
            raise self._failed_update[1]
        state = engine.weight_info().update
        if state not in ends:
            return None
        if state == "idle":
            try:
                engine.finish_update(0)
            except Exception as error:
                self._failed_update = (number, error)
                raise
        return engine.weight_info()

    def _cancel_update(self, number: int) -> bool:
        """Cancel the latest update on the thread, if it has this number."""
        if number != self._num_updates or not self._engine.cancel_update():
            return False
        self._num_cancelled = number
        return True

    # ---- adapters ---------------------------------------------------------------------------------------------------

    async def load_adapter(
        self,
        name: str,
        source: NamedWeights | str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        version: WeightLabel | None = None,
        on_running: OnAdapter = "keep",
    ) -> WeightLabel:
        """Load an adapter as `InferenceEngine.load_adapter` does; it is read and packed in a thread, beside steps."""
        load = AdapterLoad(name=name, source=source, config=config, version=version, on_running=on_running)
        async with self._loading:
            staged = await self.stage_adapter(load)
            return await self.call(lambda engine: engine.install_adapter(staged))

    async def stage_adapter(self, load: AdapterLoad) -> StagedAdapter:
        """Read and pack an adapter in a thread; raises as `load_adapter`, also if it does not fit now."""
        staged = await asyncio.to_thread(await self.call(lambda engine: engine.stage_adapter), load)
        await self.call(lambda engine: engine.check_room(staged))
        return staged

    async def unload_adapter(self, name: str) -> bool:
        """Forget an adapter, as `InferenceEngine.unload_adapter` does, after loads that were called before."""
        async with self._loading:
            return await self.call(lambda engine: engine.unload_adapter(name))

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that requests can name."""
        return await self.call(lambda engine: engine.adapters())

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def call(self, work: Callable[[Engine], Answer]) -> Answer:
        """Return `work(engine)`, run on the engine's thread between two steps. Raises `EngineDead`."""
        done: asyncio.Future[Answer] = self._new_future()
        self._inbox.put(lambda: self._answer(done, work))
        return await done

    async def watch(
        self, look: Callable[[Engine], Answer | None], first: Callable[[Engine], object] | None = None
    ) -> asyncio.Future[Answer]:
        """Call `look` on the engine's thread after every turn until it returns a value or raises; return its future.

        `look` returns None to continue. `first` runs on the thread before; its exception is raised here. Cancelling the
        future ends the calls. An idle engine takes a turn at every command, and a few a second while it is watched.
        """
        found: asyncio.Future[Answer] = self._new_future()

        def start(engine: Engine) -> None:
            if first is not None:
                first(engine)
            if not found.cancelled():
                self._watches[found] = lambda: look(engine)

        def forget(_: object) -> None:
            if found.cancelled():
                self._inbox.put(lambda: self._watches.pop(found, None))

        found.add_done_callback(forget)
        try:
            await self.call(start)
        except BaseException:
            if not found.cancel() and not found.cancelled():
                found.exception()  # the same error is raised here: it is not to be logged as never retrieved
            raise
        return found

    def wake(self) -> None:
        """Make the engine's thread take a turn. Can be called from any thread."""
        self._inbox.put(_nothing)

    def _new_future(self) -> asyncio.Future[Any]:
        """Return a future for the thread to set; the engine's end sets an exception."""
        self._require_alive()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        return future

    def _require_alive(self) -> None:
        if self.failure is not None or self._is_stopped:
            raise self._end_error(self.failure)

    # ---- on the event loop: what the thread posts -------------------------------------------------------------------

    def _deliver(self, deltas: Iterable[tuple[Outbox, int, Delta]], at: float) -> None:
        """Put deltas into the outboxes of callers that have not left."""
        for outbox, index, delta in deltas:
            if not outbox.is_closed:
                last_token = outbox.put(index, delta, at)
                if self._observer is not None:
                    self._observer.on_delta(outbox, index, delta, last_token)

    def _deliver_turn(
        self, turn: Turn, started: Iterable[tuple[Outbox, int, int]], deltas: Iterable[tuple[Outbox, int, Delta]]
    ) -> None:
        """Note which samples left the queue, deliver a step's deltas, and tell the observer."""
        for outbox, index, sample in started:
            times = outbox.times[index][sample]
            times.started = times.started or turn.began  # not again after preemption
        self._deliver(deltas, turn.ended)
        if self._observer is not None:
            self._observer.on_turn(turn)

    def _fail_all(self, error: Exception) -> None:
        for outbox in tuple(self._outboxes):
            outbox.fail(error)
        for future in tuple(self._unanswered):
            if not future.done():
                future.set_exception(error)

    def _die(self, error: BaseException) -> None:
        """Fail all callers: the thread ended with this exception, or delivering raised it."""
        if self.failure is not None or self._is_stopped:
            _log.debug("the engine had failed or was stopped before", exc_info=error)
            return
        self.failure = error
        _log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        self._fail_all(self._end_error(error))
        if self._observer is not None:
            self._observer.on_death(error)

    async def _watch_thread(self, engine: DrivenEngine) -> None:
        """Detect a thread or an engine that has ended, and a step that exceeds its timeout (prints all stacks).

        Adds up the watchdog's own waits instead of reading a clock: a frozen process (`docker pause`) is no failure.
        """
        since, waited = None, 0.0
        while self.failure is None and not self._is_stopped:
            step_timeout = self.step_timeout or math.inf
            pause = min(_WATCHDOG_S, step_timeout / 2)
            await asyncio.sleep(pause)
            is_same = since is not None and since == self._busy_since
            since, waited = self._busy_since, waited + pause if is_same else 0.0
            if not self.is_alive:
                self._die(RuntimeError("the engine's thread has ended"))
            elif (failure := engine.failure) is not None:  # a rank was lost while the thread waits for work
                self._die(failure)
            elif waited >= step_timeout:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                self._die(TimeoutError(f"a step has not ended after {step_timeout:g} seconds"))

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self, opened: asyncio.Future[Engine]) -> None:
        """Open the engine, then run turns until stopped."""
        try:
            self._engine = self._open_engine()
        except BaseException as error:
            cause = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} while loading")
            self._settle(opened, error=cause)
            return
        self._settle(opened, self._engine)
        try:
            while not self._is_ending:
                self._run_turn()
            self._engine.shutdown()
        except BaseException as error:
            failure = error
            self._post(lambda: self._die(failure))
            try:
                self._engine.shutdown()  # frees memory, groups and ranks
            except Exception:
                _log.exception("the engine that failed could not be shut down")

    def _run_turn(self) -> None:
        """Run the commands in the inbox, then one step; without work, wait for a command."""
        if not self._engine.has_pending():
            self._busy_since = None
            try:
                command = self._inbox.get(timeout=_WATCH_S if self._watches else None)
            except Empty:
                command = _nothing
            self._busy_since = time.monotonic()
            command()
        self._busy_since = time.monotonic()
        while not self._inbox.empty():
            self._inbox.get()()
        if self._is_ending:
            return
        began = time.monotonic()
        result = self._engine.tick()
        turn = Turn(result, began, time.monotonic(), self._engine.is_halted)
        started = [(*self._queued[one], sample) for one, sample in result.started if one in self._queued]
        deltas = self._taken()
        self._post(lambda: self._deliver_turn(turn, started, deltas))
        if self._is_draining and self._engine.is_halted:  # no later call would resume the engine
            self._end_requests(None)
        self._run_watches()

    def _run_watches(self) -> None:
        """Call every watch, and answer those with a result."""
        for found, look in tuple(self._watches.items()):
            try:
                answer = look()
            except Exception as error:
                del self._watches[found]
                self._settle(found, error=error)
            else:
                if answer is not None:
                    del self._watches[found]
                    self._settle(found, answer)

    def _add(self, outbox: Outbox, indices: Sequence[int]) -> None:
        """Queue requests, all or none; an invalid one fails its caller only."""
        if outbox.is_closed:
            return
        ids: list[int] = []
        try:
            for index in indices:
                ids.append(self._engine.add(outbox.requests[index], claim=True))
        except Exception as error:  # BadRequest, or from a matcher's constructor
            failure = error
            for one in ids:
                self._engine.collect(one)
            self._post(lambda: outbox.fail(failure))
            return
        outbox.ids += ids
        self._queued.update((one, (outbox, index)) for one, index in zip(ids, indices, strict=True))

    def _collect(self, outbox: Outbox) -> None:
        """Forget the requests of a caller that has left, aborting those that have not ended."""
        for one in outbox.ids:
            del self._queued[one]
            self._engine.collect(one)
        outbox.ids.clear()

    def _answer(self, done: asyncio.Future[Answer], work: Callable[[Engine], Answer]) -> None:
        """Run `work`; `done` gets its result or exception."""
        try:
            answer = work(self._engine)
        except Exception as error:
            self._settle(done, error=error)
        else:
            self._settle(done, answer)
        self._post_deltas()  # the work may have run steps, with deltas of other requests

    def _end_requests(self, ids: Iterable[int] | None) -> int:
        """End requests, all of them for None, and post their deltas; return the number of samples."""
        num_ended = len(self._engine.end_requests(ids))
        self._post_deltas()
        return num_ended

    def _drain(self) -> None:
        self._is_draining = True

    def _end(self) -> None:
        self._is_ending = True

    def _taken(self) -> list[tuple[Outbox, int, Delta]]:
        """Return the new deltas of queued requests, with their places."""
        return [(*self._queued[one.request_id], one) for one in self._engine.take_deltas(self._queued)]

    def _post_deltas(self) -> None:
        """Post the deltas of queued requests that arose outside a turn's step."""
        deltas, now = self._taken(), time.monotonic()
        if deltas:
            self._post(lambda: self._deliver(deltas, now))

    def _settle(self, done: asyncio.Future[Any], answer: object = None, *, error: Exception | None = None) -> None:
        """Set a future's result or exception, unless it was cancelled."""
        if error is not None:
            self._post(lambda: None if done.done() else done.set_exception(error))
        else:
            self._post(lambda: None if done.done() else done.set_result(answer))

    def _post(self, event: Callable[[], None]) -> None:
        """Call `event` on the event loop, unless the loop has closed."""
        assert self._loop is not None, "set before the thread starts"
        try:
            self._loop.call_soon_threadsafe(self._handle, event)
        except RuntimeError:
            _log.debug("the event loop has closed")

    def _handle(self, event: Callable[[], None]) -> None:
        """Call `event`; an exception would lose a delta, so it counts as a failure of the engine."""
        try:
            event()
        except Exception as error:
            self._die(error)


def _nothing() -> None:
    """Do nothing: the thread takes a turn."""


def _dead(cause: BaseException | None) -> EngineDead:
    """Return the default error for waiters; `cause` is None if the engine was stopped."""
    if cause is None:
        return EngineDead("the engine was stopped")
    error = EngineDead(f"the engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
