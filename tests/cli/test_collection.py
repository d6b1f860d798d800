"""The garbage collector while `serve` starts: off until requests are taken, and never left off."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nano_inference.cli import commands
from nano_inference.cli import serve as serve_command
from nano_inference.cli.collection import no_collection
from nano_inference.config import EngineConfig, ServerConfig


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_off_until_it_is_called_back() -> None:
    with no_collection() as collect_again:
        assert not gc.isenabled()
        collect_again()
        assert gc.isenabled()
    assert gc.isenabled()


def test_an_error_does_not_leave_it_off() -> None:
    with pytest.raises(ValueError, match="no such model"), no_collection():
        raise ValueError("no such model")
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    with no_collection() as collect_again:
        collect_again()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_server_starts_without_it_and_serves_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def fake(
        config: object, listening: socket.socket, *_: object, on_ready: Callable[[Any], None], **__: object
    ) -> int:
        listening.close()
        seen.append(gc.isenabled())
        on_ready(None)
        seen.append(gc.isenabled())
        return 0

    monkeypatch.setattr(serve_command, "serve", fake)
    monkeypatch.setattr(serve_command, "banner", lambda *_: "ready")
    assert commands.serve(server=ServerConfig(port=0), engine=EngineConfig(model_path="none")) == 0
    assert seen == [False, True]


def test_a_server_that_cannot_start_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: ServerConfig) -> None:
        assert not gc.isenabled()
        raise OSError("the port is taken")

    monkeypatch.setattr(serve_command, "bind", refuse)
    with pytest.raises(OSError, match="taken"):
        commands.serve(server=ServerConfig(port=0), engine=EngineConfig(model_path="none"))
    assert gc.isenabled()
