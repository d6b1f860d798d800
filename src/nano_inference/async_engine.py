"""`AsyncEngine`: an engine on its own thread (`engine_thread`), for asyncio.

An exception that escapes a step ends the thread: every waiter and every later call gets `EngineDead` with this
exception as its cause.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from nano_inference.core.admission import requests_for, score_starts, scoring_request
from nano_inference.engine_thread import DrivenEngine, Engine, EngineThread, Inbox, Receiver, Submission, Turn
from nano_inference.types import (
    BadRequest,
    Delta,
    EngineDead,
    EngineRequest,
    OnRunning,
    SamplingParams,
    TokenProgram,
    TrainingSample,
    WeightLabel,
)
from nano_inference.weights.updates import NamedWeights, WeightUpdate, update_of

Answer = TypeVar("Answer")

_WATCH_S = 1.0
"""Most seconds between two checks of the watchdog."""
_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Receives events of the engine, on the event loop: a step whose deltas have been delivered, and its failure."""

    def on_turn(self, turn: Turn) -> None: ...

    def on_death(self, error: BaseException) -> None: ...


class AsyncEngine(Generic[Engine]):
    """Owns an engine's thread. Call its methods on the event loop that started it.

        async with AsyncEngine(lambda: InferenceEngine(config)) as engine:
            samples = await engine.generate(prompts, params)
            async for delta in engine.stream(prompt, params): ...

    Cancelling a `generate` or closing a `stream` aborts its requests at the next step boundary.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        observer: Observer | None = None,
        step_timeout: float | None = None,
        end_error: Callable[[BaseException | None], Exception] | None = None,
    ) -> None:
        """`open_engine` is called on the thread. A step of more than `step_timeout` seconds counts as a failure.

        `end_error` returns the exception for waiters at the engine's end, given the failure, or None if the engine was
        stopped; the default returns `EngineDead`.
        """
        self.failure: BaseException | None = None
        """The exception that ended the engine or prevented its opening."""
        self._open_engine = open_engine
        self._observer = observer
        self.step_timeout = step_timeout
        """Seconds; None is no limit."""
        self._end_error = end_error or _dead
        self._submissions: set[Submission] = set()
        self._owners: dict[int, tuple[Submission, int]] = {}
        """Request id -> its submission and index there."""
        self._unanswered: set[asyncio.Future[Any]] = set()
        """Futures of `call` and `watch`."""
        self._is_stopped = False
        self._thread: EngineThread[Engine] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    # ---- start and stop ---------------------------------------------------------------------------------------------

    async def start(self) -> Engine:
        """Open the engine on its thread and return it. Raises what `open_engine` raised."""
        assert self._thread is None, "started twice"
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(loop, self)
        try:
            engine = await self._thread.start(self._open_engine)
        except Exception as error:
            self.failure = error
            raise
        self._watchdog = loop.create_task(self._watch(engine))
        return engine

    async def stop(self, timeout: float = 10.0) -> None:
        """Fail open requests, shut the engine down between two steps and end the thread.

        A thread that does not end within `timeout` seconds is abandoned.
        """
        self._is_stopped = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail_all(self._end_error(None))
        if self._thread is not None:
            await self._thread.stop(timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drain(self) -> None:
        """From now on, end requests that cannot continue because the engine is paused, asleep or without weights."""
        self.thread.post(EngineThread.drain)

    @property
    def thread(self) -> EngineThread[Engine]:
        """The thread; requires `start`."""
        assert self._thread is not None, "not started"
        return self._thread

    @property
    def num_unanswered(self) -> int:
        """Number of calls and watches without an answer."""
        return len(self._unanswered)

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        program: TokenProgram | None = None,
    ) -> list[TrainingSample]:
        """Return n samples of each prompt, as `InferenceEngine.generate` does. Raises `BadRequest`, `EngineDead`."""
        requests = requests_for(prompts, sampling_params, num_samples_per_prompt, program)
        found: dict[tuple[int, int], TrainingSample] = {}
        async for index, delta in self.submit_and_read(requests):
            if delta.sample is not None:
                found[index, delta.sample_index] = delta.sample
        return [found[place] for place in sorted(found)]

    async def stream(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_samples_per_prompt: int = 1,
        *,
        program: TokenProgram | None = None,
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one prompt's samples; closing the iterator aborts them."""
        request = EngineRequest(
            prompt=prompt,
            params=sampling_params or SamplingParams(),
            num_samples=num_samples_per_prompt,
            program=program,
            is_streamed=True,
        )
        async for _, delta in self.submit_and_read([request]):
            yield delta

    async def score(self, token_ids: Sequence[int], start: int = 0, *, temperature: float = 1.0) -> list[float]:
        """Return what `InferenceEngine.score` does for one text. Raises `EngineDead` too."""
        (start,) = score_starts(start, 1)
        async for _, delta in self.submit_and_read([scoring_request(token_ids, start, temperature)]):
            sample = delta.sample
        assert sample is not None, "the last delta of a request has its sample"
        if sample.finish_reason == "abort":
            raise ValueError(f"token_ids: {sample.stop_reason or 'the request was aborted'}")
        return list(sample.prompt_logprobs or ())

    async def submit_and_read(self, requests: Sequence[EngineRequest]) -> AsyncIterator[tuple[int, Delta]]:
        """Queue requests, all or none; yield (index of the request, delta) until all have ended."""
        for request in requests:
            if type(request.num_samples) is not int or request.num_samples < 1:
                raise BadRequest("num_samples", f"must be an integer >= 1, got {request.num_samples!r}")
        inbox = Inbox()
        num_open = sum(request.num_samples for request in requests)
        with self.submit(requests, inbox):
            while num_open:
                item = await inbox.items.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item[1].sample is not None
                yield item

    @contextmanager
    def submit(
        self, requests: Sequence[EngineRequest], receiver: Receiver, first: tuple[int, ...] | None = None
    ) -> Iterator[Submission]:
        """Queue requests, all or none; leaving the block aborts those that have not ended. Raises `EngineDead`.

        `first` are the indices of requests to queue now (None: all); `enter` queues the others.
        """
        self._require_alive()
        submission = Submission(requests, receiver)
        self._submissions.add(submission)
        self.enter(submission, tuple(range(len(requests))) if first is None else first)
        try:
            yield submission
        finally:
            self._close(submission)

    def enter(self, submission: Submission, indices: tuple[int, ...]) -> None:
        """Queue the requests with these indices, all or none."""
        if indices:
            self.thread.post(lambda thread: thread.submit(submission, indices))

    # ---- weights ----------------------------------------------------------------------------------------------------

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
            weights = update_of(
                weights,
                on_running=on_running,
                version=version,
                partial=partial,
                allow_nonfinite=allow_nonfinite,
                checksum=checksum,
                timeout=timeout,
            )
        engine = await self.call(lambda engine: engine)
        update = replace(weights, on_gathered=_both(self.wake, weights.on_gathered))
        started: list[int] = []
        installed: asyncio.Future[int] | None = None
        try:
            installed = await self._installed(
                engine, lambda: started.append(engine.start_update(update)), is_held=update.hold
            )
            while not installed.done():  # a silent source does not wake the thread, so its timeout is polled
                await asyncio.wait({installed}, timeout=_WATCH_S)
                self.wake()
            return installed.result()
        except asyncio.CancelledError:  # the thread may start the update after this
            if installed is not None:
                installed.cancel()
            self.thread.post(lambda _: started and engine.cancel_update())
            raise

    async def commit_update(self) -> int:
        """Install a held update, as its `on_running` says; return the installed version. Raises as `update_weights`."""
        engine = await self.call(lambda engine: engine)
        return await (await self._installed(engine, lambda: engine.commit_update(blocking=False)))

    async def cancel_update(self) -> bool:
        """Cancel an update that is not installed yet; return whether there was one."""
        return await self.call(lambda engine: engine.cancel_update())

    async def _installed(
        self, engine: DrivenEngine, start: Callable[[], object], *, is_held: bool = False
    ) -> asyncio.Future[int]:
        """Return a future of the version that `start` installs; with `is_held`, set once the weights are gathered."""
        ends = ("idle", "staged") if is_held else ("idle",)
        return await self.watch(
            lambda: engine.finish_update(0) if engine.weight_info().update in ends else None, first=start
        )

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def call(self, work: Callable[[Engine], Answer]) -> Answer:
        """Return `work(engine)`, run on the engine's thread between two steps. Raises `EngineDead`."""
        done: asyncio.Future[Answer] = self._new_future()
        self.thread.post(lambda thread: thread.call(work, done))
        return await done

    async def watch(
        self, look: Callable[[], Answer | None], first: Callable[[], object] | None = None
    ) -> asyncio.Future[Answer]:
        """Call `look` on the engine's thread after every turn until it returns a value or raises; return its future.

        `look` returns None to continue. `first` runs on the thread before; its exception is raised here. Cancelling the
        future ends the calls. An idle engine takes a turn only after a command: call `wake` after a change on another
        thread.
        """
        found: asyncio.Future[Answer] = self._new_future()

        def start(_: Engine) -> None:
            if first is not None:
                first()
            if not found.cancelled():
                self.thread.watch(look, found)

        def forget(_: object) -> None:
            if found.cancelled():
                self.thread.post(lambda thread: thread.forget(found))

        found.add_done_callback(forget)
        try:
            await self.call(start)
        except BaseException:
            found.cancel()
            raise
        return found

    def wake(self) -> None:
        """Make the engine's thread take a turn. Can be called from any thread."""
        self.thread.post(lambda _: None)

    async def end_submissions(
        self, receivers: Collection[Receiver], *, first: Callable[[], object] | None = None
    ) -> int:
        """End the open requests of these receivers as "abort"; return the number of samples.

        `first` runs just before, on the engine's thread: requests that are submitted later do not end.
        """
        wanted = [one for one in self._submissions if one.receiver in receivers]

        def end(_: Engine) -> int:
            if first is not None:
                first()
            return self.thread.end([one for each in wanted for one in each.queued_ids])

        return await self.call(end)

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

    def _fail_all(self, error: Exception) -> None:
        for submission in tuple(self._submissions):
            submission.receiver.on_failure(error)
        for future in tuple(self._unanswered):
            if not future.done():
                future.set_exception(error)

    def _close(self, submission: Submission) -> None:
        """Forget a submission; requests that have not ended are aborted at the next step boundary."""
        submission.is_closed = True
        self._submissions.discard(submission)
        ids = submission.ids
        for one in ids:
            self._owners.pop(one, None)
        if ids:
            self.thread.post(lambda thread: thread.collect(ids))

    # ---- events from the thread -------------------------------------------------------------------------------------

    def on_submitted(self, submission: Submission, indices: tuple[int, ...], ids: tuple[int, ...]) -> None:
        """Store the ids of requests that the thread queued; collect them if the submission was closed meanwhile."""
        if submission.is_closed:
            self.thread.post(lambda thread: thread.collect(ids))
            return
        submission.ids += ids
        self._owners.update((one, (submission, index)) for index, one in zip(indices, ids, strict=True))

    def on_turn(self, turn: Turn, deltas: Sequence[Delta]) -> None:
        """Deliver a step's events, the deltas of queued requests among them, to receivers and the observer."""
        for request_id, sample_index in turn.result.started:
            if request_id in self._owners:
                submission, index = self._owners[request_id]
                submission.receiver.on_started(index, sample_index, turn.began)
        self.on_deltas(deltas, turn.ended)
        if self._observer is not None:
            self._observer.on_turn(turn)

    def on_deltas(self, deltas: Sequence[Delta], at: float) -> None:
        """Deliver deltas, also from outside a turn's step, to their receivers."""
        for delta in deltas:
            if delta.request_id in self._owners:
                submission, index = self._owners[delta.request_id]
                submission.receiver.on_delta(index, delta, at)

    def on_failure(self, error: BaseException) -> None:
        """Fail all submissions and futures: the thread ended with this exception, or a method above raised it."""
        if self.failure is not None or self._is_stopped:
            return
        self.failure = error
        _log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        self._fail_all(self._end_error(error))
        if self._observer is not None:
            self._observer.on_death(error)

    async def _watch(self, engine: DrivenEngine) -> None:
        """Detect a thread or an engine that has ended, and a step that exceeds its timeout (prints all stacks).

        Adds up the watchdog's own waits instead of reading a clock: a frozen process (`docker pause`) is no failure.
        """
        since, waited = None, 0.0
        while self.failure is None and not self._is_stopped:
            step_timeout = self.step_timeout or math.inf
            pause = min(_WATCH_S, step_timeout / 2)
            await asyncio.sleep(pause)
            is_same = since is not None and since == self.thread.busy_since
            since, waited = self.thread.busy_since, waited + pause if is_same else 0.0
            if not self.thread.is_alive:
                self.on_failure(RuntimeError("the engine's thread has ended"))
            elif (failure := engine.failure) is not None:  # a rank was lost while the thread waits for work
                self.on_failure(failure)
            elif waited >= step_timeout:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                self.on_failure(TimeoutError(f"a step has not ended after {step_timeout:g} seconds"))


def _both(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    """Return a function that calls `first`, and `second` unless it is None."""

    def call() -> None:
        first()
        if second is not None:
            second()

    return call


def _dead(cause: BaseException | None) -> EngineDead:
    """Return the default error for waiters; `cause` is None if the engine was stopped."""
    if cause is None:
        return EngineDead("the engine was stopped")
    error = EngineDead(f"the engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
