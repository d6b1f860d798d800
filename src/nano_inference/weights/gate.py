"""Lets the thread that gathers weights work between steps, not during them.

A step keeps all cores busy, and its threads wait for one another some hundred times: a third thread made 32-row steps
four times as long (docs/decisions/0004-weight-staging.md). So the thread takes turns with the steps: at each boundary
it gets through a share of the weights, and while no step runs it goes on freely.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

_LONGEST_WAIT = 0.5
"""Share of the last step's time after which the next begins, whatever the thread does."""
_SOURCE_WAIT = 0.1
"""The same while the thread waits for its source, which may take long or no time at all."""


class StepGate:
    """Owns the lock between one engine's thread and one gathering thread."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_stepping = False
        self._is_asking = True
        """Whether the thread waits for its source."""
        self._is_done = False
        self._credit = 0
        self._begun_at = 0.0
        self._step_seconds = 0.1

    def begin_step(self) -> None:
        """Let the thread copy its share, wait for that, close the gate."""
        with self._changed:
            self._credit = self._share
            self._wait_for_share(time.monotonic() + _LONGEST_WAIT * self._step_seconds)
            self._credit = 0
            self._is_stepping = True
            self._begun_at = time.monotonic()

    def _wait_for_share(self, deadline: float) -> None:
        """Wait until the share is copied, the thread is done, its source lets it wait, or time is up."""
        while self._credit > 0 and not self._is_done and (left := deadline - time.monotonic()) > 0:
            was_asking = self._is_asking
            self._changed.wait(min(left, _SOURCE_WAIT * self._step_seconds) if was_asking else left)
            if was_asking and self._is_asking:
                return

    def end_step(self) -> None:
        """Open the gate."""
        with self._changed:
            if self._is_stepping:  # not when an interruption kept the step from beginning
                self._step_seconds = time.monotonic() - self._begun_at
            self._is_stepping = False
            self._changed.notify_all()

    def recover(self) -> None:
        """Release the lock if an exception kept this thread from releasing it, and open the gate."""
        with suppress(RuntimeError):  # raised once this thread does not hold it
            while True:
                self._lock.release()
        self.end_step()

    def pass_bytes(self, num_bytes: int) -> None:
        """Called by the thread before it copies so many bytes: returns when it may."""
        with self._changed:
            self._is_asking = False
            self._changed.wait_for(lambda: not self._is_stepping)
            self._credit -= num_bytes
            if self._credit <= 0:
                self._changed.notify_all()

    def ask(self) -> None:
        """Called by the thread before it asks its source for the next tensor."""
        with self._changed:
            self._is_asking = True

    def finish(self) -> None:
        """Called by the thread at its end."""
        with self._changed:
            self._is_done = True
            self._changed.notify_all()
