"""Faults in memory pages in a background thread ahead of use, so that first writes do not wait for the kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

PIECE_BYTES = 4 << 20

Populate = Callable[[int, int], None]  # faults in the bytes [start, stop). Failures are ignored: they only cost time.


class Populator:
    """Owns a thread that faults in pages up to `ahead` bytes after the highest byte in use; started on demand."""

    def __init__(self, num_bytes: int, ahead: int, populate: Populate, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._num_bytes = num_bytes
        self._ahead = ahead
        self._populate = populate
        self._piece_bytes = piece_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted = 0
        self._done = 0
        self._brought_in = 0
        self.is_closed = False
        self._thread: threading.Thread | None = None

    def reach(self, end: int) -> None:
        """Report that bytes up to `end` are in use; starts faulting in the pages after them."""
        wanted = min(end + self._ahead, self._num_bytes)
        if wanted <= self._wanted:
            return
        with self._changed:
            self._wanted = wanted
            if not self._is_running() and not self.is_closed:
                self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until all requested pages are present, at most `timeout` seconds; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._brought_in >= self._wanted, timeout)

    def close(self) -> None:
        """End the thread after its current piece: killing it at interpreter exit would abort the process."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._is_running() and self._thread is not threading.current_thread():
            self._thread.join()

    def recover(self) -> None:
        """Release the lock if an exception kept this thread from releasing it."""
        with suppress(RuntimeError):  # raised once this thread does not hold it
            while True:
                self._lock.release()

    def _is_running(self) -> bool:
        """Return True if the thread is alive; an interruption may have prevented its start."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            self._populate(*piece)
            with self._changed:
                self._brought_in = piece[1]
                self._changed.notify_all()

    def _next(self) -> tuple[int, int] | None:
        """Wait for the next range to fault in; None after `close`."""
        with self._changed:
            while self._done >= self._wanted and not self.is_closed:
                self._changed.wait()
            if self.is_closed:
                return None
            start = self._done
            self._done = min(self._wanted, start + self._piece_bytes)
            return start, self._done
