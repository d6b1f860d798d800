"""A pytest plugin: which functions of the package each test calls, and how long it takes.

The file `REACH_OUT` gets one JSON line for each test: [test, seconds, {file: [first lines of functions]}].
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class Calls:
    """Notes the functions of the package that are called; for `sys.settrace`."""

    def __init__(self, package: str) -> None:
        self._package = package + os.sep
        self.found: dict[str, set[int]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; the lines of the function are not traced."""
        code = frame.f_code
        if code.co_filename.startswith(self._package):
            self.found[code.co_filename[len(self._package) :]].add(code.co_firstlineno)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace one test, its fixtures included; what an earlier test set up for it counts for the earlier test only."""
    import nano_inference

    calls = Calls(str(Path(nano_inference.__file__).parent))
    started = time.perf_counter()
    threading.settrace(calls)
    sys.settrace(calls)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        with Path(os.environ["REACH_OUT"]).open("a") as file:
            found = {name: sorted(lines) for name, lines in calls.found.items()}
            file.write(json.dumps([item.nodeid, seconds, found]) + "\n")
