"""Fixtures of the documentation tests: a directory for each page, and servers for its requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import default_cache
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.load import open_model
from tests.docs.furniture import NANOCHAT_HOME, furnish
from tests.docs.shell import Command, Place
from tests.server.tiny import Running, make_tiny, running
from tests.web.chromium import launched
from tests.web.conftest import context  # noqa: F401  (a fixture)

SERVED = "smollm2-135m-instruct"
"""The name under which the pages ask for a model."""


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model's directory."""
    return make_tiny(tmp_path_factory.mktemp("tiny_shown"))


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Callable[[str], Path]:
    """Return the directory of a page's code, made at its first use."""
    made: dict[str, Path] = {}

    def directory(page: str) -> Path:
        if page not in made:
            made[page] = tmp_path_factory.mktemp(Path(page).stem)
            furnish(made[page], tiny_directory)
        return made[page]

    return directory


@pytest.fixture(scope="module")  # its engine is not to be there in others' tests
def tiny_server(tiny_directory: Path) -> Iterator[Running]:
    """A server of the tiny model, under the default model's name."""
    config = ServerConfig(port=0, log_requests=False, served_model_name=(SERVED,))
    with running(tiny_directory, config) as server:
        yield server


@pytest.fixture(scope="module")  # its engine is not to be there in others' tests
def trained_server(tiny_directory: Path) -> Iterator[Running]:
    """The same with the trainers' routes."""
    config = ServerConfig(port=0, log_requests=False, enable_rl=True, weight_timeout=20.0, served_model_name=(SERVED,))
    with running(tiny_directory, config) as server:
        yield server


@pytest.fixture(scope="module")  # its engine is not to be there in others' tests
def default_server(default_model_path: Path) -> Iterator[Running]:
    """A server of the default model, for replies that a page shows."""

    def opened(path: Path, config: ServerConfig, **_: Any) -> LoadedModel:
        return open_model(EngineConfig(model_path=str(path), device="cpu"), config, name=SERVED, path=path)

    with running(default_model_path, make=opened) as server:
        yield server


@pytest.fixture(scope="module")  # not longer: it occupies this thread's event loop, which other tests need
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def succeeded() -> list[Command]:
    """`Place.succeeded`."""
    return []


@pytest.fixture
def place_of(
    directory_of: Callable[[str], Path],
    succeeded: list[Command],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[[str], Place]:
    """Return the place of a page's code, and go there: its directory is the home, and where the code runs."""
    cache = default_cache(os.environ).parent

    def url(is_default: bool) -> str:
        server: Running = request.getfixturevalue("default_server" if is_default else "tiny_server")
        return server.url

    def place(page: str) -> Place:
        directory = directory_of(page)
        monkeypatch.chdir(directory)
        monkeypatch.setenv("HOME", str(directory))
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))  # the default model and the kernels are not made anew
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(directory / NANOCHAT_HOME))
        monkeypatch.setenv("NO_COLOR", "1")
        return Place(
            directory=directory,
            monkeypatch=monkeypatch,
            url=url,
            succeeded=succeeded,
            forker=lambda: request.getfixturevalue("forker"),
        )

    return place
