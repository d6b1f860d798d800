"""Fixtures of the documentation tests: the directory in which pages' code runs, and servers for its requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import default_cache
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.load import open_model
from tests.docs.shell import Command, Place
from tests.nanochat.tiny import base_meta, write_checkpoint, write_tokenizer
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
def home(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """Tiny files under the names by which pages call a reader's own: `checkpoint`, `prompts.txt`, ..."""
    place = tmp_path_factory.mktemp("home")
    shutil.copytree(tiny_directory, place / "checkpoint")  # a trainer's checkpoint: two layers, 260 tokens
    (place / "prompts.txt").write_text("What is the capital of France?\nWhat is the capital of Italy?\n")
    (place / "my.toml").write_text('model = "default"\n')
    (place / "typo.toml").write_text('model = "default"\n\n[serve]\nprot = 9000\n')
    write_tokenizer(place / "nanochat" / "tokenizer")
    for kind in ("base", "chatsft", "chatrl"):
        write_checkpoint(place / f"nanochat/{kind}_checkpoints/d20", "G4", step=650, meta=base_meta("G4"))
    flat = place / "path" / "to" / "checkpoint"  # of the first generation, which Transformers knows
    write_checkpoint(flat, "G0", step=650, meta=base_meta("G0"))
    write_tokenizer(flat)
    return place


@pytest.fixture(scope="module")  # its engine is not to be there in others' tests
def tiny_server(tiny_directory: Path) -> Iterator[Running]:
    """A server of the tiny model, under the default model's name, with the trainers' routes."""
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
    return []


@pytest.fixture
def place(
    home: Path, succeeded: list[Command], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Place:
    """Where a page's code runs."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(default_cache(os.environ).parent))  # not to make model and kernels anew
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(home / "nanochat"))
    monkeypatch.setenv("NO_COLOR", "1")
    return Place(directory=home, monkeypatch=monkeypatch, succeeded=succeeded, fixture=request.getfixturevalue)
