"""Gives memory its pages ahead of use, in a thread: the first write to a page would else wait for the system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

_PIECE_BYTES = 4 << 20

Populate = Callable[[int, int], None]
"""Told a range of bytes [start, stop) to bring in; may fail in silence, for it is only about time."""


class Populator:
    """Owns a thread that keeps some bytes ahead of the highest one in use. It holds nothing when nothing is asked."""

    def __init__(self, num_bytes: int, ahead: int, populate: Populate) -> None:
        self._num_bytes = num_bytes
        self._ahead = ahead
        self._populate = populate
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted = 0
        self._done = 0
        self._brought_in = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def reach(self, end: int) -> None:
        """Say that bytes up to `end` are in use from now on."""
        wanted = min(end + self._ahead, self._num_bytes)
        if wanted <= self._wanted:
            return
        with self._changed:
            self._wanted = wanted
            if not self._is_running() and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until everything asked for is there, for `timeout` seconds; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._brought_in >= self._wanted, timeout)

    def close(self) -> None:
        """End the thread, after the piece it is at: one that is cut off by the interpreter's end aborts the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._is_running() and self._thread is not threading.current_thread():
            self._thread.join()

    def recover(self) -> None:
        """Release the lock if an exception kept this thread from releasing it."""
        with suppress(RuntimeError):  # raised once this thread does not hold it
            while True:
                self._lock.release()

    def _is_running(self) -> bool:
        """Whether the thread was started and has not ended; an interruption may have kept it from its start."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            self._populate(*piece)
            with self._changed:
                self._brought_in = piece[1]
                self._changed.notify_all()

    def _next(self) -> tuple[int, int] | None:
        """Wait for a piece to bring in; None when there will be none."""
        with self._changed:
            while self._done >= self._wanted and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            start = self._done
            self._done = min(self._wanted, start + _PIECE_BYTES)
            return start, self._done
