"""The system's Chromium: where it is, and a context manager that runs it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The shell is the same engine without the program's windows: the tests take half of the CPU time with it."""
_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def chromium_path() -> str | None:
    """Return the program's path, None if it is not installed."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """Run a headless Chromium; skip the test if there is none."""
    path = chromium_path()
    if path is None:
        pytest.skip("NO BROWSER: no Chromium on this machine; `make browser` installs Debian's")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield browser
        browser.close()
