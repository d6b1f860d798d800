"""`serve` disables the garbage collector while it imports modules and loads the model, and enables it again."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.cli import commands
from nano_inference.cli import serve as serve_command
from nano_inference.cli.app import no_collection
from nano_inference.cli.arguments import Typed
from nano_inference.config import EngineConfig
from nano_inference.server import load as loader
from nano_inference.server.config import ServerConfig


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_collector_is_disabled_inside_the_block_only() -> None:
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_is_enabled_after_an_error() -> None:
    with pytest.raises(ValueError, match="no such model"), no_collection():
        raise ValueError("no such model")
    assert gc.isenabled()


def test_collector_stays_disabled_if_it_was() -> None:
    gc.disable()
    with no_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_serve_disables_collector_for_loading_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download can take hours, during which the server answers requests for its state."""
    seen: dict[str, bool] = {}

    async def fake(
        config: object,
        listening: socket.socket,
        open_model: Callable[[], Any],
        *,
        on_ready: Callable[[Any], None],
        **__: object,
    ) -> int:
        listening.close()
        open_model()
        seen["ready"] = gc.isenabled()
        return 0

    def fetch(*_: object) -> Path:
        seen["fetch"] = gc.isenabled()
        return Path("none")

    def load(*_: object, **__: object) -> None:
        seen["load"] = gc.isenabled()

    monkeypatch.setattr(serve_command, "serve", fake)
    monkeypatch.setattr(serve_command, "fetch", fetch)
    monkeypatch.setattr(loader, "open_model", load)
    assert commands.serve(server=ServerConfig(port=0), engine=EngineConfig(model_path="none"), typed=Typed()) == 0
    assert seen == {"fetch": True, "load": False, "ready": True}


def test_serve_enables_collector_after_failed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fake(config: object, listening: socket.socket, open_model: Callable[[], Any], **__: object) -> int:
        listening.close()
        open_model()
        return 0

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the file is damaged")

    monkeypatch.setattr(serve_command, "serve", fake)
    monkeypatch.setattr(serve_command, "fetch", lambda *_: Path("none"))
    monkeypatch.setattr(loader, "open_model", refuse)
    with pytest.raises(OSError, match="damaged"):
        commands.serve(server=ServerConfig(port=0), engine=EngineConfig(model_path="none"), typed=Typed())
    assert gc.isenabled()
