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
    """A context manager that strikes after so many bytecodes of the package, then after so many more, and so on.

    An exception that a trace function raises ends the tracing; the profile function sees the next call or return and
    starts it again.
    """

    def __init__(self, gaps: Sequence[int]) -> None:
        self._gaps = list(gaps)
        self.num_seen = 0
        """Bytecodes of the package that ran."""
        self.struck: list[str] = []
        """Functions in which an exception was raised."""

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        self._trace_all(sys._getframe())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)
        sys.setprofile(None)

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
        if event == "opcode":
            self.num_seen += 1
            if self._gaps:
                self._gaps[0] -= 1
                if self._gaps[0] <= 0:
                    del self._gaps[0]
                    self.struck.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                    raise KeyboardInterrupt
        return self._trace
