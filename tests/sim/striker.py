"""Raises `KeyboardInterrupt` before chosen bytecodes of the package, several in one run: the recovery is struck too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import nano_inference

HOME = str(Path(nano_inference.__file__).parent)


class Striker:
    """A context manager that strikes after so many calls and bytecodes of the package, then after more bytecodes.

    It counts bytecodes after `num_calls` calls of the package's functions: to count them takes ten times as long as to
    run them.

    An exception that a trace function raises ends the tracing; the profile function sees the next call or return and
    starts it again.
    """

    def __init__(self, gaps: Sequence[int], *, num_calls: int = 0) -> None:
        self._gaps, self._num_calls = list(gaps), num_calls
        self.num_seen = 0
        """Calls of the package's functions, up to `num_calls`."""
        self.struck: list[str] = []
        """Functions in which an exception was raised."""

    def __enter__(self) -> Self:
        if self._num_calls:
            sys.settrace(self._count)
        else:
            self._start(sys._getframe())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if self.num_seen < self._num_calls:
            self.num_seen += 1
            return None
        self._start(frame)
        return self._trace

    def _start(self, frame: FrameType) -> None:
        sys.setprofile(self._profile)
        self._trace_all(frame)

    def _trace_all(self, frame: FrameType | None) -> None:
        sys.settrace(self._trace)
        while frame is not None:
            if frame.f_code.co_filename.startswith(HOME):
                frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self._trace, True, False
            frame = frame.f_back

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if sys.gettrace() is None and frame.f_code.co_filename != __file__:
            self._trace_all(frame)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and self._gaps:
            self._gaps[0] -= 1
            if self._gaps[0] <= 0:
                del self._gaps[0]
                self.struck.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                raise KeyboardInterrupt
        return self._trace
