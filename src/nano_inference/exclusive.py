"""`Exclusive`: admits one thread, or one call, at a time, and cannot be left locked by an exception.

An exception such as Ctrl-C can arrive between any two bytecodes, those of an `__exit__` or a `finally` included. A flag
or lock that a call sets at its start and clears at its end can therefore stay set although the call is over. Whether a
generator runs is recorded by the interpreter itself, so each call runs inside a generator, and the call
holds the engine exactly as long as that generator runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Call:
    """One call: the generator that runs it, the thread that entered, and the call that came after it."""

    __slots__ = ("after", "body", "thread")

    def __init__(self) -> None:
        self.body: Generator[None, None, Any] | None = None
        self.thread = threading.get_ident()
        self.after: dict[str, _Call] = {}

    def is_running(self) -> bool:
        return self.body is not None and inspect.getgeneratorstate(self.body) == inspect.GEN_RUNNING


class Exclusive:
    """Runs one call at a time and refuses others meanwhile. Thread-safe."""

    def __init__(self, busy: Callable[[], Exception]) -> None:
        """`busy` makes the error that a refused call raises."""
        self._busy = busy
        self._last = _Call()

    def run(self, work: Callable[[], Result]) -> Result:
        """Return `work()`. Raises `busy()` when another call runs, in this thread or another."""
        call = _Call()
        call.body = self._enter(call, work)
        try:
            next(call.body)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        raise AssertionError("the call's generator returns without a yield")

    def is_running(self) -> bool:
        """Return True while a call runs, in whatever thread."""
        return self._newest().is_running()

    def is_running_here(self) -> bool:
        """Return True while a call runs that this thread entered."""
        call = self._newest()
        return call.is_running() and call.thread == threading.get_ident()

    def _enter(self, call: _Call, work: Callable[[], Result]) -> Generator[None, None, Result]:
        """Claim the place and work. It is claimed from inside: a call is never visible before it runs."""
        last = self._newest()
        while True:
            if last.is_running():
                raise self._busy()
            after = last.after.setdefault("after", call)  # one atomic operation: of two threads, one wins
            if after is call:
                break
            last = after
        self._last = call
        return work()
        yield

    def _newest(self) -> _Call:
        """Return the call that entered last; `_last` lags behind when an exception struck a call that entered."""
        call = self._last
        while after := call.after.get("after"):
            call = after
        return call
