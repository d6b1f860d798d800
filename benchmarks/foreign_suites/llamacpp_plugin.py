"""A pytest plugin for llama.cpp's tests: downloads no model, and compares names of headers without their case."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from requests.structures import CaseInsensitiveDict


def pytest_configure() -> None:
    """Change the suite's helper before its tests import it."""
    sys.path.insert(0, str(Path.cwd()))
    utils: Any = importlib.import_module("utils")
    utils.ServerPreset.load_all = staticmethod(lambda: None)

    class Response(utils.ServerResponse):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, CaseInsensitiveDict(value) if name == "headers" else value)

    utils.ServerResponse = Response
