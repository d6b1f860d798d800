"""`Leader`: rank 0's side of the links. It sends every command, and all ranks execute commands in the same order.

A message is a command, the number of an executor among the copies of one engine, and arguments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from nano_inference.parallel.links import Group, Links
from nano_inference.types import EngineDead

_PULSE_S = 1.0  # without a command for so long, rank 0 asks the other ranks for a sign of life
_STOP_S = 5.0  # longest wait of `close` for the end of a question, and of a message of an update
Result = TypeVar("Result")


class Leader:
    """Owns the links of rank 0 and the thread that finds lost ranks while no step runs. Thread-safe."""

    def __init__(
        self,
        links: Links,
        on_close: Callable[[], None],
        on_failure: Callable[[], None],
        *,
        is_fed: bool,
        has_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """One of the first two callbacks is called once, before the links are closed.

        `has_lost` returns whether a rank's process has ended; called while a step runs.

        `is_fed`: the other ranks execute commands at any time, so that lost ones are found while no step runs, and get
        the tensors of updates beside steps, by a group of their own. Otherwise every rank has the tensors itself.
        """
        self.links, self.is_fed = links, is_fed
        self.failure: EngineDead | None = None  # why no command can be executed any more; None while all ranks work
        self._on_close, self._on_failure, self._has_lost = on_close, on_failure, has_lost
        self._is_lost = False  # found while a step ran
        self._lock = threading.RLock()
        self._weights_lock = threading.RLock() if is_fed else self._lock
        self._main_thread_work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-0")
        self._last_command = time.monotonic()
        self._is_closed = threading.Event()
        if is_fed:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def step(self, command: str, number: int, arguments: Callable[[], list[Any]], work: Callable[[], Result]) -> Result:
        """Return `work()`, which the other ranks execute too, as a command; an exception on any rank ends the engine.

        `arguments` returns the command's. Raises `EngineDead`.
        """

        def run() -> Result:
            with self._lock:
                self._send(command, number, *arguments())
                try:
                    result = work()
                    if self._is_lost:  # an aborted device has computed anything
                        raise EngineDead(f"rank 0 of {self.links.size} lost another rank: its process has ended")
                    return result
                except BaseException as error:
                    raise self._fail(error) from error

        return self._uninterrupted(run)

    def ask(self, command: str, number: int, arguments: list[Any], work: Callable[[], Result]) -> Result:
        """Return `work()` after every rank has executed a command.

        Raises the exception of `work`, `RuntimeError` with the message of another rank, `EngineDead`.
        """

        def run() -> Result:
            with self._lock:
                self._send(command, number, *arguments)
                try:
                    result = work()
                    faults = self.links.commands.exchange("")
                except EngineDead as error:
                    raise self._fail(error) from error
                except Exception as error:  # reported where the other ranks report theirs
                    try:
                        self.links.commands.exchange(f"{type(error).__name__}: {error}")
                    except EngineDead as further:
                        raise self._fail(further) from further
                    raise
                for rank, fault in enumerate(faults):
                    if fault:
                        raise RuntimeError(f"rank {rank}: {fault}")
                return result

        return self._uninterrupted(run)

    def gather(self, command: str, number: int, argument: float, work: Callable[[], int]) -> Tensor:
        """Return the numbers that `work` returns here, and a command on the other ranks."""
        commands = self.links.commands
        return self.ask(command, number, [argument], lambda: commands.gather(torch.tensor([work()])))

    @contextmanager
    def updating(self) -> Iterator[Group]:
        """Yield the group of weight updates, for one message and its reply. A failure ends the engine."""
        try:
            with self._weights_lock:
                yield self.links.weights if self.is_fed else self.links.commands
        except EngineDead as error:  # without the lock: `_fail` waits for the end of a step
            with self._lock:
                raise self._fail(error) from error

    def close(self) -> None:
        """End the other ranks. Can be called again. Ranks that do not answer are ended as after a failure."""
        if not self._lock.acquire(timeout=_STOP_S):
            self._on_failure()  # a question waits for a rank that hangs; now it fails
            self._lock.acquire()
        try:
            if self.failure is None and not self._is_closed.is_set():
                self._send("stop", 0)
                is_stopping = not self.is_fed or self._stop_receivers()
                if self.failure is None:
                    self._end(self._on_close if is_stopping else self._on_failure)
        finally:
            self._lock.release()

    def _stop_receivers(self) -> bool:
        """End the threads that receive weights; return False if a rank is lost, or a message takes too long."""
        if not self._weights_lock.acquire(timeout=_STOP_S):
            return False
        try:
            with self.updating() as group:
                group.broadcast("stop", 0)
        except EngineDead:
            return False
        finally:
            self._weights_lock.release()
        return True

    def _send(self, command: str, number: int, *arguments: Any) -> None:
        if self.failure is not None:
            raise EngineDead(str(self.failure)) from self.failure
        if self._is_closed.is_set():
            raise EngineDead("the engine was shut down")
        self._last_command = time.monotonic()
        try:
            self.links.commands.broadcast(command, number, *arguments)
        except EngineDead as error:
            raise self._fail(error) from error

    def _fail(self, error: BaseException) -> EngineDead:
        """Close the links after a failure that leaves ranks in different places; return the exception to raise."""
        if self.failure is None:
            self.failure = error if isinstance(error, EngineDead) else EngineDead(f"{type(error).__name__}: {error}")
            self._end(self._on_failure)
        return self.failure

    def _end(self, callback: Callable[[], None]) -> None:
        self._is_closed.set()
        callback()
        self.links.close()

    def _watch(self) -> None:
        """Ask the other ranks for a sign of life while no command is executed; look for their processes during one."""
        while not self._is_closed.wait(_PULSE_S):
            if not self._lock.acquire(blocking=False):
                if not self._is_lost and self._has_lost():
                    self._is_lost = True
                    self.links.data.abort()  # the host waits for the device, and that for the lost rank
                continue
            try:
                if not self._is_closed.is_set() and time.monotonic() - self._last_command >= _PULSE_S:
                    self.ask("ping", 0, [], lambda: None)
            except (EngineDead, RuntimeError):
                return
            finally:
                self._lock.release()

    def _uninterrupted(self, work: Callable[[], Result]) -> Result:
        """Return `work()`; raise a `KeyboardInterrupt` of the main thread after its end.

        Work of the main thread runs on another one: Ctrl-C inside a collective operation would block the other ranks.
        """
        if threading.current_thread() is not threading.main_thread():
            return work()  # signals reach the main thread only
        future: Future[Result] = self._main_thread_work.submit(work)
        interrupt: KeyboardInterrupt | None = None
        while not future.done():
            try:
                wait([future])
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return future.result()
