"""Fixtures with a real Chromium, the system's own (never downloaded by the test tool)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from tests.server.tiny import Running, make_tiny, running
from tests.web.chat_driver import ChatDriver
from tests.web.chromium import launched
from tests.web.fake import TIMEOUT_S, FakeServer, serving

expect.set_options(timeout=1000 * TIMEOUT_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow: most need Chromium."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")  # not longer: it occupies this thread's event loop, which other tests need
def browser() -> Iterator[Browser]:
    """A headless Chromium; without one the tests are skipped (`make browser` installs it)."""
    with launched() as browser:
        yield browser


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A new browser profile."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(1000 * TIMEOUT_S)
    yield context
    context.close()


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model's directory."""
    return make_tiny(tmp_path_factory.mktemp("tiny_paged"))


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    """A real server with the tiny model."""
    with running(tiny_directory) as one:
        yield one


@pytest.fixture
def server_url(server: Running) -> str:
    return server.url


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server with scripted answers."""
    with serving() as server:
        yield server


@pytest.fixture
def chat(context: BrowserContext, fake: FakeServer) -> ChatDriver:
    return ChatDriver(context, fake.url)
