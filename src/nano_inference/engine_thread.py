"""`EngineThread`: the thread that drives an engine. Commands come down a queue, news go up to an event loop.

The thread runs the commands that wait, then one step, in turns. Nothing else is shared between the two sides.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nano_inference.control import Control
from nano_inference.types import Delta, EngineRequest, StepResult, TrainingSample

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


class DrivenEngine(Protocol):
    """What the thread needs of an engine; `InferenceEngine` is one."""

    @property
    def control(self) -> Control:
        """Pauses, sleep, updates of the weights."""

    def add(self, request: EngineRequest, *, claim: bool = False) -> int:
        """Queue a request and return its id."""

    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return what came for these claimed requests since the last time."""

    def collect(self, request_id: int) -> list[TrainingSample]:
        """Forget a request; what has not ended is aborted."""

    def end_requests(self, request_ids: Iterable[int] | None = None) -> tuple[Delta, ...]:
        """End requests now; return their last deltas."""

    def has_pending(self) -> bool:
        """Whether `tick` has anything to do."""

    def tick(self) -> StepResult:
        """Run one step."""

    def shutdown(self) -> None:
        """Let go of everything."""


Engine = TypeVar("Engine", bound=DrivenEngine)


class Turn(NamedTuple):
    """One step as the thread ran it; times are of the monotonic clock, in seconds."""

    result: StepResult
    began: float
    ended: float
    is_halted: bool
    """Whether no further step may run before the engine is resumed or woken."""


class Receiver(Protocol):
    """Where a submission's news go. Called on the event loop; an exception from here ends the engine's thread."""

    def on_started(self, prompt_index: int, sample_index: int, at: float) -> None:
        """A sample left the queue at that time; one that was preempted leaves it again."""

    def on_delta(self, prompt_index: int, delta: Delta, at: float) -> None:
        """A sample got tokens, or ended, at that time."""

    def on_failure(self, error: Exception) -> None:
        """No more will come: `BadRequest` refuses the request, `EngineDead` is the engine's end."""


class Submission:
    """Requests of one caller, which are queued together or some at a time."""

    def __init__(self, requests: Sequence[EngineRequest], receiver: Receiver) -> None:
        self.requests = tuple(requests)
        self.receiver = receiver
        self.ids: tuple[int, ...] = ()
        """The engine's names of those that were queued, as the event loop knows them."""
        self.queued_ids: tuple[int, ...] = ()
        """The same; accessed only from the engine's thread."""
        self.is_closed = False


class Listener(Protocol):
    """The other side of the thread. Called on the event loop, in the order in which things happened."""

    def on_submitted(self, submission: Submission, indices: tuple[int, ...], ids: tuple[int, ...]) -> None:
        """The requests at these places of a submission were queued, under these ids."""

    def on_turn(self, turn: Turn, deltas: Sequence[Delta]) -> None:
        """A step was run, with these deltas for queued requests."""

    def on_deltas(self, deltas: Sequence[Delta], at: float) -> None:
        """Queued requests got these outside of a turn's step."""

    def on_failure(self, error: BaseException) -> None:
        """The thread has ended with that exception, or one of the methods above raised it."""


class EngineThread(Generic[Engine]):
    """Owns the thread and the engine in it. Its public methods can be called from the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self.busy_since: float | None = None
        """When the thread started what it does now; None while it waits. Written by the thread."""
        self._loop = loop
        self._listener = listener
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # From here on accessed only from the thread.
        self._watches: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        """What it looks for after every turn."""
        self._queued: set[int] = set()
        """Requests that were queued and not collected."""
        self._is_draining = False
        """Whether what can no longer run is to be ended."""

    # ---- on the event loop ------------------------------------------------------------------------------------------

    async def start(self, open_engine: Callable[[], Engine]) -> Engine:
        """Open the engine on the thread; return it when it can be asked. Raises what opening raised."""
        opened: asyncio.Future[Engine] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(open_engine, opened), name="engine", daemon=True)
        self._thread.start()
        return await opened

    async def stop(self, timeout: float) -> None:
        """Shut the engine down between two steps, and wait for the thread's end `timeout` seconds at most."""
        self._commands.put(_raise_stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_commands(self) -> int:
        """Commands that the thread has not run yet."""
        return self._commands.qsize()

    def submit(self, submission: Submission, indices: tuple[int, ...]) -> None:
        """Queue the requests at these places of a submission, all or none."""
        self._commands.put(lambda: self._submit(submission, indices))

    def collect(self, ids: tuple[int, ...]) -> None:
        """Forget requests; what has not ended is aborted."""
        self._commands.put(lambda: self._collect(ids))

    def call(self, work: Callable[[Engine], Answer], done: asyncio.Future[Answer]) -> None:
        """Run something between two steps; `done` gets what it returns or raises."""
        self._commands.put(lambda: self._call(work, done))

    def forget(self, found: asyncio.Future[Any]) -> None:
        """Stop looking for what a `watch` was to find."""
        self._commands.put(lambda: self._forget(found))

    def drain(self) -> None:
        """From now on end requests that cannot continue because no step may run."""
        self._commands.put(self._begin_drain)

    def wake(self) -> None:
        """Take a turn. Can be called from any thread."""
        self._commands.put(_nothing)

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def watch(self, look: Callable[[], Answer | None], found: asyncio.Future[Answer]) -> None:
        """Call `look` after every turn until it returns something, which `found` gets. Called on the thread."""
        self._watches[found] = look

    @property
    def num_watches(self) -> int:
        """What is looked for after every turn. Read on the thread."""
        return len(self._watches)

    def end(self, ids: Iterable[int]) -> int:
        """End requests; their deltas are sent. Return how many samples that were. Called on the thread."""
        num_ended = len(self._engine.end_requests(ids))
        self._send_deltas()
        return num_ended

    def _run(self, open_engine: Callable[[], Engine], opened: asyncio.Future[Engine]) -> None:
        """The thread: open the engine, then run commands and steps in turns until stopped."""
        try:
            self._engine = open_engine()
        except BaseException as error:
            cause = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} while loading")
            self._send(lambda: None if opened.done() else opened.set_exception(cause))
            return
        self._send(lambda: None if opened.done() else opened.set_result(self._engine))
        try:
            while True:
                self._run_turn()
        except _Stop:
            self._engine.shutdown()
        except BaseException as error:
            failure = error
            self._send(lambda: self._listener.on_failure(failure))

    def _run_turn(self) -> None:
        """Run the commands that wait, then one step; without work, wait for a command."""
        if not self._engine.has_pending():
            self.busy_since = None
            command = self._commands.get()
            self.busy_since = time.monotonic()
            command()
        self.busy_since = time.monotonic()
        self._run_commands()
        began = time.monotonic()
        result = self._engine.tick()
        turn = Turn(result, began, time.monotonic(), self._engine.control.is_halted)
        deltas = self._engine.take_deltas(self._queued)
        self._send(lambda: self._listener.on_turn(turn, deltas))
        self._end_stranded()
        self._run_watches()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _submit(self, submission: Submission, indices: tuple[int, ...]) -> None:
        """Queue requests of a submission; a refusal fails this submission alone."""
        if submission.is_closed:
            return
        ids: list[int] = []
        try:
            for one in (submission.requests[index] for index in indices):
                ids.append(self._engine.add(one, claim=True))
        except Exception as error:  # of one request: a matcher that cannot be built
            refusal = error
            self._collect(tuple(ids))
            self._send(lambda: submission.receiver.on_failure(refusal))
            return
        self._queued.update(ids)
        submission.queued_ids += tuple(ids)
        self._send(lambda: self._listener.on_submitted(submission, indices, tuple(ids)))

    def _collect(self, ids: tuple[int, ...]) -> None:
        self._queued.difference_update(ids)
        for one in ids:
            self._engine.collect(one)

    def _call(self, work: Callable[[Engine], Answer], done: asyncio.Future[Answer]) -> None:
        try:
            answer = work(self._engine)
        except Exception as error:
            self._send_failure(done, error)
        else:
            self._send_answer(done, answer)
        self._send_deltas()  # the work may have run steps, with deltas of other requests

    def _begin_drain(self) -> None:
        self._is_draining = True

    def _end_stranded(self) -> None:
        """While draining, end everything when no step may run: no caller is left who could resume the engine."""
        if self._is_draining and self._engine.control.is_halted:
            self._engine.end_requests()
            self._send_deltas()

    def _run_watches(self) -> None:
        """Look for what is waited for, and answer what is there."""
        for found, look in tuple(self._watches.items()):
            try:
                answer = look()
            except Exception as error:
                self._forget(found)
                self._send_failure(found, error)
            else:
                if answer is not None:
                    self._forget(found)
                    self._send_answer(found, answer)

    def _forget(self, found: asyncio.Future[Any]) -> None:
        self._watches.pop(found, None)

    def _send_deltas(self) -> None:
        """Send what came for queued requests outside of a turn's own step."""
        deltas, now = self._engine.take_deltas(self._queued), time.monotonic()
        if deltas:
            self._send(lambda: self._listener.on_deltas(deltas, now))

    def _send_answer(self, done: asyncio.Future[Any], answer: object) -> None:
        self._send(lambda: None if done.done() else done.set_result(answer))

    def _send_failure(self, done: asyncio.Future[Any], error: Exception) -> None:
        self._send(lambda: None if done.done() else done.set_exception(error))

    def _send(self, news: Callable[[], None]) -> None:
        """Run something on the event loop; nothing when it has closed."""
        try:
            self._loop.call_soon_threadsafe(self._hear, news)
        except RuntimeError:
            _log.debug("the event loop has closed")

    def _hear(self, news: Callable[[], None]) -> None:
        """Take news on the event loop. A failure there would lose a delta, so it ends the engine as one here does."""
        try:
            news()
        except Exception as error:
            self._listener.on_failure(error)


class _Stop(Exception):
    """Ends the thread."""


def _raise_stop() -> None:
    raise _Stop


def _nothing() -> None:
    """A command that only lets the thread take a turn."""
