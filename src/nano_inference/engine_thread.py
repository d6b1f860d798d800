"""`EngineThread`: the thread that drives an engine.

It runs the queued commands, then one step, in turns, and posts events to an event loop. Nothing else is shared.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nano_inference.types import (
    Delta,
    EngineRequest,
    PauseMode,
    StepResult,
    TrainingSample,
    WeightInfo,
    WeightLabel,
)
from nano_inference.weights.updates import WeightUpdate

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


class DrivenEngine(Protocol):
    """The part of `InferenceEngine`, which imports torch, that the thread and the server use."""

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def is_halted(self) -> bool: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_pausing(self) -> bool: ...

    @property
    def is_asleep(self) -> bool: ...

    @property
    def has_weights(self) -> bool: ...

    def add(self, request: EngineRequest, *, claim: bool = False) -> int: ...

    def take_deltas(self, request_ids: Container[int]) -> list[Delta]: ...

    def collect(self, request_id: int) -> list[TrainingSample]: ...

    def end_requests(self, request_ids: Iterable[int] | None = None) -> tuple[Delta, ...]: ...

    def has_pending(self) -> bool: ...

    def tick(self) -> StepResult: ...

    def shutdown(self) -> None: ...

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None: ...

    def cancel_pause(self) -> bool: ...

    def resume(self) -> None: ...

    def flush_cache(self) -> int: ...

    def sleep(self, *, discard_weights: bool = False) -> None: ...

    def wake(self) -> None: ...

    def start_update(self, update: WeightUpdate) -> int: ...

    def finish_update(self, timeout: float | None = None) -> int: ...

    def commit_update(self, *, blocking: bool = True) -> int: ...

    def cancel_update(self) -> bool: ...

    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None: ...

    def expect_checksum(self, checksum: str) -> None: ...

    def weight_info(self) -> WeightInfo: ...

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def weights_dtype(self) -> str: ...

    def weights_checksum(self) -> str: ...


Engine = TypeVar("Engine", bound=DrivenEngine)


class Turn(NamedTuple):
    """One step; times are in seconds of the monotonic clock."""

    result: StepResult
    began: float
    ended: float
    is_halted: bool
    """Whether no further step can run before the engine is resumed or woken."""


class Receiver(Protocol):
    """Receives a submission's events on the event loop. An exception here counts as a failure of the engine."""

    def on_started(self, prompt_index: int, sample_index: int, at: float) -> None:
        """A sample left the queue, also again after preemption."""

    def on_delta(self, prompt_index: int, delta: Delta, at: float) -> None:
        """A sample got tokens or ended."""

    def on_failure(self, error: Exception) -> None:
        """The submission failed: `BadRequest`, or `EngineDead` at the engine's end. No more events follow."""


class Inbox:
    """The receiver of one `generate` or `stream`: a queue of (index of the request, delta), or the failure."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    def on_started(self, prompt_index: int, sample_index: int, at: float) -> None:
        """Ignored."""

    def on_delta(self, prompt_index: int, delta: Delta, at: float) -> None:
        self.items.put_nowait((prompt_index, delta))

    def on_failure(self, error: Exception) -> None:
        self.items.put_nowait(error)


class Submission:
    """Requests of one caller, queued together or in parts."""

    def __init__(self, requests: Sequence[EngineRequest], receiver: Receiver) -> None:
        self.requests = tuple(requests)
        self.receiver = receiver
        self.ids: tuple[int, ...] = ()
        """Ids of queued requests; accessed only on the event loop."""
        self.queued_ids: tuple[int, ...] = ()
        """The same; accessed only on the engine's thread."""
        self.is_closed = False


class Listener(Protocol):
    """Receives the thread's events on the event loop, in order: `AsyncEngine`, which documents the methods."""

    def on_submitted(self, submission: Submission, indices: tuple[int, ...], ids: tuple[int, ...]) -> None: ...

    def on_turn(self, turn: Turn, deltas: Sequence[Delta]) -> None: ...

    def on_deltas(self, deltas: Sequence[Delta], at: float) -> None: ...

    def on_failure(self, error: BaseException) -> None: ...


class EngineThread(Generic[Engine]):
    """Owns the thread and its engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self.busy_since: float | None = None
        """When the current work started; None while the thread waits. Written by the thread."""
        self._loop = loop
        self._listener = listener
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Accessed only on the thread:
        self._watches: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        """Future -> the function to call after every turn."""
        self._queued: set[int] = set()
        """Requests that were not collected."""
        self._is_draining = False
        """Whether to end requests that cannot run."""

    # ---- called on the event loop -----------------------------------------------------------------------------------

    async def start(self, open_engine: Callable[[], Engine]) -> Engine:
        """Open the engine on the thread and return it. Raises what `open_engine` raised."""
        opened: asyncio.Future[Engine] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(open_engine, opened), name="engine", daemon=True)
        self._thread.start()
        return await opened

    async def stop(self, timeout: float) -> None:
        """Shut the engine down between two steps; wait at most `timeout` seconds for the thread."""
        self._commands.put(_raise_stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_commands(self) -> int:
        return self._commands.qsize()

    def post(self, command: Callable[[EngineThread[Engine]], object]) -> None:
        """Call `command(self)` on the thread between two steps, and take a turn. Can be called from any thread."""
        self._commands.put(lambda: command(self))

    # ---- called on the thread, by commands --------------------------------------------------------------------------

    def submit(self, submission: Submission, indices: tuple[int, ...]) -> None:
        """Queue the requests with these indices, all or none; an invalid one fails this submission only."""
        if submission.is_closed:
            return
        ids: list[int] = []
        try:
            for one in (submission.requests[index] for index in indices):
                ids.append(self._engine.add(one, claim=True))
        except Exception as error:  # BadRequest, or from a matcher's constructor
            failure = error
            self.collect(tuple(ids))
            self._send(lambda: submission.receiver.on_failure(failure))
            return
        self._queued.update(ids)
        submission.queued_ids += tuple(ids)
        self._send(lambda: self._listener.on_submitted(submission, indices, tuple(ids)))

    def collect(self, ids: tuple[int, ...]) -> None:
        """Forget requests, aborting those that have not ended."""
        self._queued.difference_update(ids)
        for one in ids:
            self._engine.collect(one)

    def call(self, work: Callable[[Engine], Answer], done: asyncio.Future[Answer]) -> None:
        """Run `work`; `done` gets its result or exception."""
        try:
            answer = work(self._engine)
        except Exception as error:
            self._settle(done, error=error)
        else:
            self._settle(done, answer)
        self._send_deltas()  # the work may have run steps, with deltas of other requests

    def watch(self, look: Callable[[], Answer | None], found: asyncio.Future[Answer]) -> None:
        """Call `look` after every turn until it returns a value or raises; `found` gets the outcome."""
        self._watches[found] = look

    def forget(self, found: asyncio.Future[Any]) -> None:
        """End a `watch`."""
        self._watches.pop(found, None)

    def drain(self) -> None:
        """From now on, end requests that cannot continue because no step can run."""
        self._is_draining = True

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def end(self, ids: Iterable[int] | None) -> int:
        """End requests, all of them for None, and send their deltas; return the number of samples."""
        num_ended = len(self._engine.end_requests(ids))
        self._send_deltas()
        return num_ended

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self, open_engine: Callable[[], Engine], opened: asyncio.Future[Engine]) -> None:
        """Open the engine, then run turns until stopped."""
        try:
            self._engine = open_engine()
        except BaseException as error:
            cause = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} while loading")
            self._settle(opened, error=cause)
            return
        self._settle(opened, self._engine)
        try:
            while True:
                self._run_turn()
        except _Stop:
            self._engine.shutdown()
        except BaseException as error:
            failure = error
            self._send(lambda: self._listener.on_failure(failure))

    def _run_turn(self) -> None:
        """Run the queued commands, then one step; without work, wait for a command."""
        if not self._engine.has_pending():
            self.busy_since = None
            command = self._commands.get()
            self.busy_since = time.monotonic()
            command()
        self.busy_since = time.monotonic()
        while not self._commands.empty():
            self._commands.get()()
        began = time.monotonic()
        result = self._engine.tick()
        turn = Turn(result, began, time.monotonic(), self._engine.is_halted)
        deltas = self._engine.take_deltas(self._queued)
        self._send(lambda: self._listener.on_turn(turn, deltas))
        if self._is_draining and self._engine.is_halted:  # no later call would resume the engine
            self.end(None)
        self._run_watches()

    def _run_watches(self) -> None:
        """Call every watch, and answer those with a result."""
        for found, look in tuple(self._watches.items()):
            try:
                answer = look()
            except Exception as error:
                self.forget(found)
                self._settle(found, error=error)
            else:
                if answer is not None:
                    self.forget(found)
                    self._settle(found, answer)

    def _send_deltas(self) -> None:
        """Send the deltas of queued requests that arose outside a turn's step."""
        deltas, now = self._engine.take_deltas(self._queued), time.monotonic()
        if deltas:
            self._send(lambda: self._listener.on_deltas(deltas, now))

    def _settle(self, done: asyncio.Future[Any], answer: object = None, *, error: Exception | None = None) -> None:
        """Set a future's result or exception, unless it was cancelled."""
        if error is not None:
            self._send(lambda: None if done.done() else done.set_exception(error))
        else:
            self._send(lambda: None if done.done() else done.set_result(answer))

    def _send(self, event: Callable[[], None]) -> None:
        """Call `event` on the event loop, unless the loop has closed."""
        try:
            self._loop.call_soon_threadsafe(self._handle, event)
        except RuntimeError:
            _log.debug("the event loop has closed")

    def _handle(self, event: Callable[[], None]) -> None:
        """Call `event`; an exception would lose a delta, so it counts as a failure of the engine."""
        try:
            event()
        except Exception as error:
            self._listener.on_failure(error)


class _Stop(Exception):
    """Ends the thread."""


def _raise_stop() -> None:
    raise _Stop
