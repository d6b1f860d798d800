"""`Leader`: rank 0's side of the links. It sends every command, and all ranks execute commands in the same order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from nano_inference.parallel.links import Links
from nano_inference.parallel.messages import pack
from nano_inference.parallel.staged import WeightFeed
from nano_inference.types import EngineDead

_PULSE_S = 1.0  # without a command for so long, rank 0 asks the other ranks for a sign of life
_STOP_S = 5.0  # longest wait of `close` for the end of a question, and of a message of an update
Result = TypeVar("Result")


class Leader:
    """Owns the links of rank 0 and the thread that finds lost ranks while no step runs. Thread-safe."""

    def __init__(
        self, links: Links, on_close: Callable[[], None], on_failure: Callable[[], None], *, is_serving: bool
    ) -> None:
        """One of the callbacks is called once, before the links are closed.

        `is_serving`: the other ranks execute commands at any time, so that lost ones are found while no step runs.
        """
        self.links = links
        self.failure: EngineDead | None = None  # why no command can be executed any more; None while all ranks work
        self._on_close, self._on_failure = on_close, on_failure
        self._lock = threading.RLock()
        self._calls = _Uninterrupted()
        self._last_command = time.monotonic()
        self._is_closed = threading.Event()
        self._weights_lock = threading.RLock()
        self._is_serving = is_serving
        if is_serving:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def feed(self, number: int, *, is_fed: bool) -> WeightFeed:
        """Return the feed of an executor's updates: with `is_fed`, beside steps through a group of its own."""
        if is_fed:
            return WeightFeed(self.links.weights, self._weights_lock, number, self._fail_between_steps)
        return WeightFeed(self.links.commands, self._lock, number, self._fail_between_steps)

    def step(self, command: str, arguments: Callable[[], dict[str, Any]], work: Callable[[], Result]) -> Result:
        """Return `work()`, which the other ranks execute too, as a command; an exception on any rank ends the engine.

        `arguments` returns the command's. Raises `EngineDead`.
        """

        def run() -> Result:
            with self._lock:
                self._send(command, arguments())
                try:
                    return work()
                except BaseException as error:
                    raise self._fail(error) from error

        return self._calls.run(run)

    def ask(self, command: str, arguments: dict[str, Any], work: Callable[[], Result]) -> Result:
        """Return `work()` after every rank has executed a command.

        Raises the exception of `work`, `RuntimeError` with the message of another rank, `EngineDead`.
        """
        return self._calls.run(lambda: self._ask(command, arguments, work))

    def _ask(self, command: str, arguments: dict[str, Any], work: Callable[[], Result]) -> Result:
        with self._lock:
            self._send(command, arguments)
            try:
                result = work()
            except EngineDead as error:
                raise self._fail(error) from error
            except Exception as error:
                self._faults(f"{type(error).__name__}: {error}")
                raise
            for rank, fault in enumerate(self._faults("")):
                if fault:
                    raise RuntimeError(f"rank {rank}: {fault}")
            return result

    def _send(self, command: str, arguments: dict[str, Any]) -> None:
        if self.failure is not None:
            raise EngineDead(str(self.failure)) from self.failure
        if self._is_closed.is_set():
            raise EngineDead("the engine was shut down")
        self._last_command = time.monotonic()
        try:
            self.links.commands.broadcast(pack(command, arguments))
        except EngineDead as error:
            raise self._fail(error) from error

    def _faults(self, own: str) -> list[str]:
        try:
            return self.links.commands.exchange(own)
        except EngineDead as error:
            raise self._fail(error) from error

    def _fail(self, error: BaseException) -> EngineDead:
        """Close the links after a failure that leaves ranks in different places; return the exception to raise."""
        if self.failure is None:
            self.failure = error if isinstance(error, EngineDead) else EngineDead(f"{type(error).__name__}: {error}")
            self._end(self._on_failure)
        return self.failure

    def _fail_between_steps(self, error: EngineDead) -> EngineDead:
        with self._lock:
            return self._fail(error)

    def close(self) -> None:
        """End the other ranks. Can be called again. Ranks that do not answer are ended as after a failure."""
        if not self._lock.acquire(timeout=_STOP_S):
            self._on_failure()  # a question waits for a rank that hangs; now it fails
            self._lock.acquire()
        try:
            if self.failure is None and not self._is_closed.is_set():
                self._send("stop", {})
                is_stopping = not self._is_serving or self._stop_receivers()
                if self.failure is None:
                    self._end(self._on_close if is_stopping else self._on_failure)
        finally:
            self._lock.release()

    def _stop_receivers(self) -> bool:
        """End the threads that receive weights; return False if a rank is lost, or a message takes too long."""
        if not self._weights_lock.acquire(timeout=_STOP_S):
            return False
        try:
            self.feed(0, is_fed=True).send("stop", {})
        except EngineDead:
            return False
        finally:
            self._weights_lock.release()
        return True

    def _end(self, callback: Callable[[], None]) -> None:
        self._is_closed.set()
        callback()
        self.links.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(_PULSE_S):
            if not self._lock.acquire(blocking=False):
                continue  # a command is executed, which finds a lost rank itself
            try:
                if not self._is_closed.is_set() and time.monotonic() - self._last_command >= _PULSE_S:
                    self._ask("ping", {}, lambda: None)
            except (EngineDead, RuntimeError):
                return
            finally:
                self._lock.release()


class _Uninterrupted:
    """Owns a thread that runs work of the main thread: Ctrl-C inside a collective operation would block other ranks."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-0")

    def run(self, work: Callable[[], Result]) -> Result:
        """Return `work()`; raise a `KeyboardInterrupt` of the main thread after its end."""
        if threading.current_thread() is not threading.main_thread():
            return work()  # signals reach the main thread only
        future: Future[Result] = self._thread.submit(work)
        interrupt: KeyboardInterrupt | None = None
        while not future.done():
            try:
                wait([future])
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return future.result()
