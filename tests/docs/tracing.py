"""Which functions of the package a call executes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.test_rooms import HOME


def traced(work: Callable[[], Any]) -> tuple[set[str], Any]:
    """Return the package's files whose functions `work` executes, and its result."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # not the body of an imported module or class
            files.add(code.co_filename)

    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return {file.removeprefix(f"{HOME}/") for file in files if file.startswith(f"{HOME}/")}, result
