"""Where the system's Chromium is."""

from __future__ import annotations

import shutil

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The shell is the same engine without the program's windows: the tests take half of the CPU time with it."""


def chromium_path() -> str | None:
    """Return the program's path, None if it is not installed."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)
