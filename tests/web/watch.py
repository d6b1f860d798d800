"""Records console errors and requests of a page to other servers; checks accessibility with axe-core."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import axe_playwright_python
from playwright.sync_api import ConsoleMessage, Page, Request

_AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")


class Watch:
    """Collects a page's console messages, exceptions and requests to other origins."""

    def __init__(self, page: Page, origin: str) -> None:
        self.origin = origin
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.foreign.append(request.url)

    def assert_clean(self, allowed: Iterable[str] = ()) -> None:
        """Fail for any recorded event, except for errors that contain one of the allowed texts."""
        allowed = tuple(allowed)
        assert [one for one in self.errors if not any(text in one for text in allowed)] == []
        assert self.foreign == []


def axe_violations(page: Page) -> list[str]:
    """Return the violations that axe-core finds in a page's current state: rule and elements."""
    if page.evaluate("typeof axe === 'undefined'"):
        page.evaluate(_AXE.read_text())
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
