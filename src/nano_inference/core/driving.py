"""`Driving`: the right to call an engine, and the places where Ctrl-C may interrupt a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from nano_inference.types import EngineBusy


class Driving:
    """Owns the right to call an engine: `with driving:` takes it, or raises `EngineBusy` at once.

    While the main thread has it, SIGINT waits: its handler runs where a call opens a window, or at the call's end. So
    Ctrl-C never leaves a change of the engine half done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the right
        self._depth = 0  # its calls that are inside one another
        self._windows: list[tuple[int, bool]] = []  # the depth of each window, and whether it admits calls
        self._is_spent = False  # whether SIGINT's handler has raised in the last window
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # SIGINT's own while ours replaces it
        self._waiting: tuple[int, FrameType | None] | None = None  # the arguments of a SIGINT that waits
        self.window = _Window(self, admits_calls=False)  # `with` it around a model's step, or a wait
        self.callers_window = _Window(self, admits_calls=True)  # around a caller's code, which may call the engine

    def __enter__(self) -> None:
        if self._holder != threading.get_ident():
            self._take()
        elif not (self._is_in_window and self._windows[-1][1]):
            raise EngineBusy(
                "the engine was called from inside one of its own steps, by a token program, a matcher or a signal "
                "handler; call it between two steps"
            )
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        while self._is_in_window:  # an interrupt kept it from being closed
            self._windows.pop()
        self._depth -= 1
        self._is_spent = False
        if self._depth:
            self._let_sigint_in()
            return
        self._holder = None
        self._lock.release()
        self._restore_sigint()

    @property
    def is_nested(self) -> bool:
        """Whether the running call is inside another one."""
        return self._depth > 1

    @property
    def _is_in_window(self) -> bool:
        return bool(self._windows) and self._windows[-1][0] == self._depth

    def _take(self) -> None:
        """Take the lock, after SIGINT waits: a lock taken by a call that an interrupt ended would stay locked."""
        handler = signal.getsignal(signal.SIGINT)
        # A handler of another signal that runs right here may call this again: it must not take ours for SIGINT's own.
        if self._handler is None and callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_sigint)
        if not self._lock.acquire(blocking=False):
            self._restore_sigint()
            raise EngineBusy(
                "another thread is using the engine: one thread drives it at a time; AsyncEngine serves several callers"
            )
        self._holder = threading.get_ident()

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self._is_spent or not self._is_in_window or self._handler is None:
            self._waiting = number, frame
            return
        self._is_spent = True  # a second one must not interrupt what the first one makes necessary
        self._handler(number, frame)
        self._is_spent = False  # it has not raised

    def _let_sigint_in(self) -> None:
        if self._waiting is not None and self._is_in_window:
            waiting, self._waiting = self._waiting, None
            self._on_sigint(*waiting)

    def _restore_sigint(self) -> None:
        """Give SIGINT its handler back, and call it if one waits."""
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGINT, self._handler)
        handler, self._handler = self._handler, None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            handler(*waiting)


class _Window:
    """A part of a call in which SIGINT's handler may run; whatever it raises ends the part."""

    def __init__(self, driving: Driving, *, admits_calls: bool) -> None:
        self._driving = driving
        self._admits_calls = admits_calls

    def __enter__(self) -> None:
        self._driving._is_spent = False
        self._driving._windows.append((self._driving._depth, self._admits_calls))
        self._driving._let_sigint_in()

    def __exit__(self, *_: object) -> None:
        self._driving._windows.pop()
