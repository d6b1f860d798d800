"""Schedules the staging thread between engine steps.

A step occupies all cores, and its threads synchronise hundreds of times: one more busy thread made 32-row steps four
times as long (docs/decisions/0004-weight-staging.md). The staging thread therefore pauses during steps: it copies a
share of the weights before each step, and runs freely while no step runs. The CUDA executor's steps leave the cores
idle, so there it does not pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_STEPS = 8  # number of steps over which staging is spread while the engine is busy
_SMALLEST_SHARE = 8 << 20  # bytes
_LONGEST_WAIT = 0.5  # longest delay of a step, as a share of the last step's duration
_SOURCE_WAIT = 0.1  # the same while the staging thread waits for its source


def share_of(weight_bytes: int) -> int:
    """Return the bytes that the staging thread copies before each step."""
    return max(_SMALLEST_SHARE, weight_bytes // _STEPS)


class StepGate:
    """Owns the lock between one engine thread and one staging thread; `share` is in bytes per step."""

    def __init__(self, share: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_stepping = False
        self._is_reading_source = True  # True while the staging thread waits for its source
        self._is_done = False
        self._credit = 0
        self._started_at = 0.0
        self._step_seconds = 0.1

    def begin_step(self) -> None:
        """Wait until the staging thread has copied its share, then pause it. Called by the engine thread."""
        with self._changed:
            self._credit = self._share
            deadline = self._clock() + _LONGEST_WAIT * self._step_seconds
            while self._credit > 0 and not self._is_done and (left := deadline - self._clock()) > 0:
                was_reading = self._is_reading_source
                self._changed.wait(min(left, _SOURCE_WAIT * self._step_seconds) if was_reading else left)
                if was_reading and self._is_reading_source:
                    break  # the source is slow
            self._credit = 0
            self._is_stepping = True
            self._started_at = self._clock()

    def end_step(self) -> None:
        """Let the staging thread run. Called by the engine thread."""
        with self._changed:
            if self._is_stepping:  # False if an interruption prevented the step
                self._step_seconds = self._clock() - self._started_at
            self._is_stepping = False
            self._changed.notify_all()

    def wait_for_turn(self, num_bytes: int) -> None:
        """Block while a step runs. Called by the staging thread before it copies `num_bytes` bytes."""
        with self._changed:
            self._is_reading_source = False
            self._changed.wait_for(lambda: not self._is_stepping)
            self._credit -= num_bytes
            if self._credit <= 0:
                self._changed.notify_all()

    def start_reading(self) -> None:
        """Called by the staging thread before it reads the next tensor from its source."""
        with self._changed:
            self._is_reading_source = True

    def finish(self) -> None:
        """Called by the staging thread when it ends."""
        with self._changed:
            self._is_done = True
            self._changed.notify_all()
