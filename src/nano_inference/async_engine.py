"""`AsyncEngine`: an engine on a thread of its own, for asyncio.

The thread itself is `engine_thread`'s. An exception that escapes a step ends the thread: every waiter gets `EngineDead`
with that exception as its cause, and so does every later call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

from nano_inference.admission import params_for_each, score_starts
from nano_inference.engine_thread import Engine, EngineThread, Receiver, Submission, Turn
from nano_inference.types import (
    BadRequest,
    Delta,
    EngineDead,
    EngineRequest,
    SamplingParams,
    TokenProgram,
    TrainingSample,
)

Answer = TypeVar("Answer")

_WATCH_S = 1.0
"""Longest time between two looks of the watchdog at the thread."""
_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who follows the engine as a whole. Called on the event loop."""

    def on_turn(self, turn: Turn) -> None:
        """A step was run; its deltas have been handed out."""

    def on_death(self, error: BaseException) -> None:
        """The engine failed."""


class AsyncEngine(Generic[Engine]):
    """Owns an engine's thread. Its methods are called on the event loop that started it.

        async with AsyncEngine(lambda: InferenceEngine(config)) as engine:
            samples = await engine.generate(prompts, params)
            async for delta in engine.stream(prompt, params): ...

    Cancelling a `generate`, or leaving a `stream`, aborts its requests at the next step boundary.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        observer: Observer | None = None,
        step_timeout: float | None = None,
        end_error: Callable[[BaseException | None], Exception] | None = None,
    ) -> None:
        """`open_engine` is called on the thread. A step of more than `step_timeout` seconds is taken for a failure.

        `end_error` makes what waiters get at the engine's end, from what it failed of, or from None when it was
        stopped; the default is `EngineDead`.
        """
        self.failure: BaseException | None = None
        """What the engine failed of, or could not be opened for."""
        self._open_engine = open_engine
        self._observer = observer
        self.step_timeout = step_timeout
        """Seconds; None never takes a step for a failure."""
        self._end_error = end_error or _dead
        self._submissions: set[Submission] = set()
        self._owners: dict[int, tuple[Submission, int]] = {}
        """The engine's request id -> the submission, and which of its requests."""
        self._asked: set[asyncio.Future[Any]] = set()
        """What `call` and `watch` have not answered yet."""
        self._is_stopped = False
        self._running: EngineThread[Engine] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> Engine:
        """Open the engine on its thread; return it when it can be asked. Raises what opening raised."""
        assert self._running is None, "started twice"
        loop = asyncio.get_running_loop()
        self._running = EngineThread(loop, self)
        try:
            engine = await self._running.start(self._open_engine)
        except Exception as error:
            self.failure = error
            raise
        if self.step_timeout is not None:
            self._watchdog = loop.create_task(self._watch())
        return engine

    async def stop(self, timeout: float = 10.0) -> None:
        """Fail what is open, shut the engine down between two steps and end the thread.

        A thread that does not end within `timeout` seconds is left behind.
        """
        self._is_stopped = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail_all(self._end_error(None))
        if self._running is not None:
            await self._running.stop(timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drain(self) -> None:
        """From now on end requests that cannot continue because the engine is paused, asleep or without weights."""
        self.thread.drain()

    @property
    def thread(self) -> EngineThread[Engine]:
        """The thread, once `start` was called."""
        assert self._running is not None, "not started"
        return self._running

    @property
    def num_unanswered(self) -> int:
        """Calls and watches that have no answer yet."""
        return len(self._asked)

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        program: TokenProgram | None = None,
    ) -> list[TrainingSample]:
        """Return the samples of all prompts, prompt-major, as `InferenceEngine.generate` does.

        Raises `BadRequest` when a prompt is refused, and `EngineDead`. Cancelling aborts all of them.
        """
        each = params_for_each(prompts, sampling_params)
        requests = [
            EngineRequest(prompt=prompt, params=params, num_samples=num_samples_per_prompt, program=program)
            for prompt, params in zip(prompts, each, strict=True)
        ]
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
        """Yield what each step adds to the samples of one prompt; leaving the loop aborts them."""
        request = EngineRequest(
            prompt=prompt,
            params=sampling_params or SamplingParams(),
            num_samples=num_samples_per_prompt,
            program=program,
        )
        async for _, delta in self.submit_and_read([request]):
            yield delta

    async def score(self, token_ids: Sequence[int], start: int = 0, *, temperature: float = 1.0) -> list[float]:
        """Return the log-probability of each token from position max(start, 1) on, as `InferenceEngine.score` does.

        Raises `BadRequest`, `ValueError` when the logits are not finite, and `EngineDead`.
        """
        (start,) = score_starts(start, 1)
        params = SamplingParams(temperature=temperature, max_tokens=0, prompt_logprobs=0, logprobs_mode="tempered")
        async for _, delta in self.submit_and_read([EngineRequest(prompt=token_ids, params=params, score_start=start)]):
            sample = delta.sample
        assert sample is not None, "the last delta of a request has its sample"
        if sample.finish_reason == "abort":
            raise ValueError(f"token_ids: {sample.stop_reason or 'the request was aborted'}")
        return list(sample.prompt_logprobs or ())

    async def submit_and_read(self, requests: Sequence[EngineRequest]) -> AsyncIterator[tuple[int, Delta]]:
        """Queue requests, all or none; yield (which of them, what a step added to it) until all have ended."""
        if not requests:
            return
        for request in requests:
            if type(request.num_samples) is not int or request.num_samples < 1:
                raise BadRequest(f"num_samples must be an integer >= 1, got {request.num_samples!r}")
        inbox = _Inbox(sum(request.num_samples for request in requests))
        with self.submit(requests, inbox):
            while not inbox.is_done:
                for item in await inbox.take():
                    yield item

    @contextmanager
    def submit(
        self, requests: Sequence[EngineRequest], receiver: Receiver, first: tuple[int, ...] | None = None
    ) -> Iterator[Submission]:
        """Queue requests, all or none; leaving the block aborts what is still open. Raises `EngineDead`.

        `first` are the places of those to queue at once, all of them for None; `enter` queues the others.
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
        """Queue some of a submission's requests, all or none of these."""
        if indices:
            self.thread.submit(submission, indices)

    async def call(self, work: Callable[[Engine], Answer]) -> Answer:
        """Return `work(engine)`, run on the engine's thread between two steps. Raises `EngineDead`."""
        done: asyncio.Future[Answer] = self._ask()
        self.thread.call(work, done)
        return await done

    async def watch(
        self, look: Callable[[], Answer | None], first: Callable[[], object] | None = None
    ) -> asyncio.Future[Answer]:
        """Let the engine's thread look for something after every turn until it is found; return its future.

        `first` is run there before, and what it raises is raised here; `look` returns None until it finds something, or
        raises. To cancel the future ends the looking. An engine that has nothing to do takes a turn after each command
        only: a change made on another thread must be followed by `wake`.
        """
        found: asyncio.Future[Answer] = self._ask()

        def begin(_: Engine) -> None:
            if first is not None:
                first()
            if not found.cancelled():
                self.thread.watch(look, found)

        def forget(_: object) -> None:
            if found.cancelled():
                self.thread.forget(found)

        found.add_done_callback(forget)
        try:
            await self.call(begin)
        except BaseException:
            found.cancel()
            raise
        return found

    def wake(self) -> None:
        """Let the engine's thread take a turn. Can be called from any thread."""
        self.thread.wake()

    async def end_submissions(
        self, receivers: Collection[Receiver], *, first: Callable[[], object] | None = None
    ) -> int:
        """End the open requests of these receivers; return how many samples that were.

        The receivers get the samples with what they have, as "abort". `first` is run just before, on the engine's
        thread: what is submitted later is not ended.
        """
        wanted = [one for one in self._submissions if one.receiver in receivers]

        def end(_: Engine) -> int:
            if first is not None:
                first()
            return self.thread.end([one for each in wanted for one in each.queued_ids])

        return await self.call(end)

    def _ask(self) -> asyncio.Future[Any]:
        """Return the future of something that the thread is to answer; the engine's end answers it, too."""
        self._require_alive()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return future

    def _require_alive(self) -> None:
        if self.failure is not None or self._is_stopped:
            raise self._end_error(self.failure)

    def _fail_all(self, error: Exception) -> None:
        for submission in tuple(self._submissions):
            submission.receiver.on_failure(error)
        for future in tuple(self._asked):
            if not future.done():
                future.set_exception(error)

    def _close(self, submission: Submission) -> None:
        """Forget a submission; what has not ended is aborted at the next step boundary."""
        submission.is_closed = True
        self._submissions.discard(submission)
        for one in submission.ids:
            self._owners.pop(one, None)
        if submission.ids:
            self.thread.collect(submission.ids)

    # ---- what the thread reports ------------------------------------------------------------------------------------

    def on_submitted(self, submission: Submission, indices: tuple[int, ...], ids: tuple[int, ...]) -> None:
        """Record the submission of these requests; collect them if the caller has left meanwhile."""
        if submission.is_closed:
            self.thread.collect(ids)
            return
        submission.ids += ids
        self._owners.update((one, (submission, index)) for index, one in zip(indices, ids, strict=True))

    def on_turn(self, turn: Turn, deltas: Sequence[Delta]) -> None:
        """Hand out what a step gave."""
        for request_id, sample_index in turn.result.started:
            if request_id in self._owners:
                submission, index = self._owners[request_id]
                submission.receiver.on_started(index, sample_index, turn.began)
        self.on_deltas(deltas, turn.ended)
        if self._observer is not None:
            self._observer.on_turn(turn)

    def on_deltas(self, deltas: Sequence[Delta], at: float) -> None:
        """Hand out deltas."""
        for delta in deltas:
            if delta.request_id in self._owners:
                submission, index = self._owners[delta.request_id]
                submission.receiver.on_delta(index, delta, at)

    def on_failure(self, error: BaseException) -> None:
        """Fail everything that is open."""
        if self.failure is not None or self._is_stopped:
            return
        self.failure = error
        _log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        self._fail_all(self._end_error(error))
        if self._observer is not None:
            self._observer.on_death(error)

    async def _watch(self) -> None:
        """Notice a thread that has ended, and a step that does not end; write the stacks of all threads then.

        Looks are counted, not the clock: in a process that was frozen (`docker pause`) neither side could run.
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
            elif waited >= step_timeout:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                self.on_failure(TimeoutError(f"a step has not ended after {step_timeout:g} seconds"))


class _Inbox:
    """The receiver of one `generate` or `stream`."""

    def __init__(self, num_samples: int) -> None:
        self._num_open = num_samples
        self._items: deque[tuple[int, Delta]] = deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended and everything was taken."""
        return not self._num_open and not self._items and self._failure is None

    def on_started(self, prompt_index: int, sample_index: int, at: float) -> None:
        """Nothing waits for a sample's start."""

    def on_delta(self, prompt_index: int, delta: Delta, at: float) -> None:
        """Keep a delta."""
        self._items.append((prompt_index, delta))
        self._num_open -= delta.sample is not None
        self._news.set()

    def on_failure(self, error: Exception) -> None:
        """Let `take` raise that."""
        self._failure = error
        self._news.set()

    async def take(self) -> list[tuple[int, Delta]]:
        """Wait until there is anything, and return it. Raises what the submission failed with."""
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        items = list(self._items)
        self._items.clear()
        return items


def _dead(cause: BaseException | None) -> EngineDead:
    """Return the error of a call to an engine that failed of that, or was stopped."""
    if cause is None:
        return EngineDead("the engine was stopped")
    error = EngineDead(f"the engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
