"""Counts executed lines of Python: a measure of work that is the same in every run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Lines:
    """The lines executed so far in the block of `counted_lines`, by this thread."""

    within: str
    count: int = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Count a line; for `sys.settrace`."""
        if self.within not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self.trace


@contextmanager
def counted_lines(within: str = "") -> Iterator[Lines]:
    """Count the lines of the functions that the block calls, in files whose path contains `within`."""
    lines, before = Lines(within), sys.gettrace()
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
