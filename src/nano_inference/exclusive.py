"""`Exclusive`: mutual exclusion that no exception can leave locked.

An exception such as Ctrl-C can arrive between any two bytecodes, those of a `finally` included, so a flag or lock that
a call sets and clears can stay set. The interpreter itself records whether a generator runs, so each call runs inside a
generator and excludes others while that runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Call:
    """One call: its generator, its thread, and the call after it."""

    __slots__ = ("after", "body", "thread")

    def __init__(self) -> None:
        self.body: Generator[None, None, Any] | None = None
        self.thread = threading.get_ident()
        self.after: dict[str, _Call] = {}

    def is_running(self) -> bool:
        return self.body is not None and inspect.getgeneratorstate(self.body) == inspect.GEN_RUNNING


class Exclusive:
    """Runs one call at a time and refuses others. Thread-safe."""

    def __init__(self, busy: Callable[[], Exception]) -> None:
        """`busy` returns the exception that a refused call raises."""
        self._busy = busy
        self._last = _Call()

    def run(self, work: Callable[[], Result]) -> Result:
        """Return `work()`. Raises `busy()` while another call runs, in this thread or another."""
        call = _Call()
        call.body = self._enter(call, work)
        try:
            next(call.body)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        raise AssertionError("the call's generator returns without a yield")

    def is_running(self) -> bool:
        """Return whether a call runs in any thread."""
        return self._newest().is_running()

    def is_running_here(self) -> bool:
        """Return whether a call of this thread runs."""
        call = self._newest()
        return call.is_running() and call.thread == threading.get_ident()

    def _enter(self, call: _Call, work: Callable[[], Result]) -> Generator[None, None, Result]:
        """Become the newest call, then run `work`: inside the generator, so that a visible call always runs."""
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
        """Return the newest call; `_last` is older if an exception interrupted `_enter`."""
        call = self._last
        while after := call.after.get("after"):
            call = after
        return call
