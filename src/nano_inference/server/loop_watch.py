"""`LoopWatchdog`: ends the process if its event loop is blocked.

A blocked loop can neither answer nor handle SIGTERM: only SIGKILL would end the process. Two checks for two cases:

- A callback does not return, but the GIL is released now and then. A thread detects that the loop does not run its
  callback, dumps all stacks and ends the process with exit code 1.
- Native code holds the GIL, so that the thread cannot run either. A timer of the process's CPU time, which the thread
  restarts at each check, expires; its signal (SIGPROF) dumps all stacks and ends the process.

Neither uses wall-clock time: time in which the process was frozen (`docker pause`, SIGSTOP) does not count.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Self, TextIO

LOOP_TIMEOUT_S = 30.0
"""Seconds that one callback may block the event loop."""
_EXIT_CODE = 1
_CHECKS_PER_S = 4
_SLACK_CHECKS = 16
"""Checks whose CPU time, on all cores, is added to the timer: a busy machine delays the thread."""
_log = logging.getLogger("nano_inference.server")


class LoopWatchdog:
    """Owns the thread and the CPU timer, from `start` to `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit_s: float = LOOP_TIMEOUT_S) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._check_s = min(1 / _CHECKS_PER_S, limit_s / 4)
        self._cpu_s = limit_s + _SLACK_CHECKS * self._check_s * (os.cpu_count() or 1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)

    def start(self) -> Self:
        """Start the thread and the timer. Must be called in the main thread."""
        try:
            faulthandler.register(signal.SIGPROF, file=_stderr(), all_threads=True, chain=True)
        except (OSError, RuntimeError, ValueError):
            _log.debug("no stderr for a stack dump")  # the signal still ends the process
        self._set_timer()
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the thread and the timer."""
        self._closed.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)

    def _run(self) -> None:
        """Repeat in the thread: schedule a callback on the loop, wait until it has run, pause."""
        while not self._closed.wait(self._check_s):
            ran = threading.Event()
            try:
                self._loop.call_soon_threadsafe(ran.set)
            except RuntimeError:  # the loop has closed
                return
            self._wait_for(ran)

    def _wait_for(self, ran: threading.Event) -> None:
        """Wait until the callback has run; end the process if it has not after checks for `limit_s` seconds."""
        left = round(self._limit_s / self._check_s)
        while not self._closed.is_set():
            self._set_timer()
            if ran.wait(self._check_s):
                return
            left -= 1
            if left == 0:
                self._end()

    def _set_timer(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)

    def _end(self) -> None:
        _log.error("the event loop has not run for %g seconds; the process ends", self._limit_s)
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.dump_traceback(file=_stderr(), all_threads=True)
        os._exit(_EXIT_CODE)


def _stderr() -> TextIO:
    return sys.__stderr__ or sys.stderr
