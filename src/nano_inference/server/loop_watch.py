"""`LoopWatchdog`: ends a server whose event loop has stopped, from outside the loop.

A loop that does not run cannot answer, and cannot handle SIGTERM: only SIGKILL would end the process. Two guards, since
a loop can stop in two ways:

- Something runs on the loop and does not return, but releases Python's lock now and then. A thread notices that the
  loop does not run what it is given, dumps all stacks and ends the process with exit code 1.
- Native code holds Python's lock: that thread cannot run either. A timer of the process's own CPU time, which the
  thread sets anew at every look, expires; its signal dumps all stacks and ends the process (SIGPROF).

Neither counts the clock: a process that was frozen (`docker pause`, SIGSTOP) resumes with the time it had.
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
"""Seconds that the event loop may take for one callback."""
_EXIT_CODE = 1
_LOOKS_PER_S = 4
_SLACK_LOOKS = 16
"""Looks whose CPU time, on all cores, is added to the timer: a machine with other work delays the thread."""
_log = logging.getLogger("nano_inference.server")


class LoopWatchdog:
    """Owns the thread and the CPU timer, from `start` to `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit_s: float = LOOP_TIMEOUT_S) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._look_s = min(1 / _LOOKS_PER_S, limit_s / 4)
        self._cpu_s = limit_s + _SLACK_LOOKS * self._look_s * (os.cpu_count() or 1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)

    def start(self) -> Self:
        """Start to watch. Called in the main thread."""
        try:
            faulthandler.register(signal.SIGPROF, file=_stderr(), all_threads=True, chain=True)
        except (OSError, RuntimeError, ValueError):
            _log.debug("there is no stderr for a stack dump")  # the signal still ends the process
        self._set_timer()
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)

    def _run(self) -> None:
        """The thread: let the loop run something, wait until it has, pause."""
        while not self._closed.wait(self._look_s):
            ran = threading.Event()
            try:
                self._loop.call_soon_threadsafe(ran.set)
            except RuntimeError:  # the loop has closed
                return
            self._wait_for(ran)

    def _wait_for(self, ran: threading.Event) -> None:
        """Wait until the loop has run; end the process when the looks of `limit_s` were in vain."""
        left = round(self._limit_s / self._look_s)
        while not self._closed.is_set():
            self._set_timer()
            if ran.wait(self._look_s):
                return
            left -= 1
            if left == 0:
                self._end()

    def _set_timer(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)

    def _end(self) -> None:
        """Log why, dump all stacks, end the process."""
        _log.error("the event loop has not run for %g seconds; the process ends", self._limit_s)
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.dump_traceback(file=_stderr(), all_threads=True)
        os._exit(_EXIT_CODE)


def _stderr() -> TextIO:
    return sys.__stderr__ or sys.stderr
