"""`Driving`: the right to call an engine, and the places where Ctrl-C may interrupt a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nano_inference.types import EngineBusy


class Driving:
    """Owns the right to call an engine: `with driving:` takes it, or raises `EngineBusy` at once.

    While the main thread has it, SIGINT waits: its handler runs where a call opens a `window`, or at the call's end. So
    Ctrl-C never leaves a change of the engine half done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        """The thread that has the right."""
        self._outer: list[tuple[bool, bool]] = []
        """For each call of the holder, one inside the other: the two values below before it."""
        self._admits_sigint = False
        self._admits_calls = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        """SIGINT's own handler while ours replaces it."""
        self._waiting: tuple[int, FrameType | None] | None = None
        """The arguments of a SIGINT that waits."""

    def __enter__(self) -> None:
        if self._holder != threading.get_ident():
            self._take()
        elif not self._admits_calls:
            raise EngineBusy(
                "the engine was called from inside one of its own steps, by a token program, a matcher or a signal "
                "handler; call it between two steps"
            )
        self._outer.append((self._admits_sigint, self._admits_calls))
        self._admits_sigint = self._admits_calls = False

    def __exit__(self, *_: object) -> None:
        self._admits_sigint, self._admits_calls = self._outer.pop()
        if self._outer:
            self._let_sigint_in()
            return
        self._holder = None
        self._lock.release()
        self._restore_sigint()

    @contextmanager
    def window(self, *, calls: bool = False) -> Iterator[None]:
        """Let SIGINT in, and with `calls` also calls of this thread: around a model's step, a wait, a caller's code."""
        before = self._admits_sigint, self._admits_calls
        try:
            self._admits_calls = calls
            self._admits_sigint = True
            self._let_sigint_in()
            yield
        finally:
            self._admits_sigint, self._admits_calls = before

    @property
    def is_nested(self) -> bool:
        """Whether the running call is inside another one."""
        return len(self._outer) > 1

    def _take(self) -> None:
        """Take the lock, after SIGINT waits: a lock taken by a call that an interrupt ended would stay locked."""
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_sigint)
        if not self._lock.acquire(blocking=False):
            self._restore_sigint()
            raise EngineBusy(
                "another thread is using the engine: one thread drives it at a time; AsyncEngine serves several callers"
            )
        self._holder = threading.get_ident()

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if not self._admits_sigint or self._handler is None:
            self._waiting = number, frame
            return
        self._admits_sigint = False  # a second one must not interrupt what the first one makes necessary
        self._handler(number, frame)
        self._admits_sigint = True  # the handler has not raised

    def _let_sigint_in(self) -> None:
        if self._admits_sigint and self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._on_sigint(*waiting)

    def _restore_sigint(self) -> None:
        """Give SIGINT its handler back, and call it if one waits."""
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._on_sigint:
            signal.signal(signal.SIGINT, self._handler)
        handler, self._handler = self._handler, None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            handler(*waiting)
