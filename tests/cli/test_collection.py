"""The garbage collector while `serve` starts: off while modules and the model come, and never left off."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.cli import commands
from nano_inference.cli import serve as serve_command
from nano_inference.cli.collection import no_collection
from nano_inference.cli.spelling import Typed
from nano_inference.config import EngineConfig, ServerConfig
from nano_inference.server import opening


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_again_behind() -> None:
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_does_not_leave_it_off() -> None:
    with pytest.raises(ValueError, match="no such model"), no_collection():
        raise ValueError("no such model")
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    with no_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_model_is_loaded_without_it_and_fetched_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download may take hours, and requests for its state come meanwhile."""
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
    monkeypatch.setattr(opening, "open_model", load)
    assert commands.serve(server=ServerConfig(port=0), engine=EngineConfig(model_path="none"), typed=Typed()) == 0
    assert seen == {"fetch": True, "load": False, "ready": True}


def test_a_model_that_cannot_be_loaded_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fake(config: object, listening: socket.socket, open_model: Callable[[], Any], **__: object) -> int:
        listening.close()
        open_model()
        return 0

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the file is damaged")

    monkeypatch.setattr(serve_command, "serve", fake)
    monkeypatch.setattr(serve_command, "fetch", lambda *_: Path("none"))
    monkeypatch.setattr(opening, "open_model", refuse)
    with pytest.raises(OSError, match="damaged"):
        commands.serve(server=ServerConfig(port=0), engine=EngineConfig(model_path="none"), typed=Typed())
    assert gc.isenabled()
