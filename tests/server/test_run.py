"""The `serve` process in-process: its socket, and shutdown after a failed listener."""

from __future__ import annotations

import asyncio
import signal
import stat
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from nano_inference.server.config import ServerConfig, SettingError
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.run import Listener, Shutdown, bind, serve
from tests.server.tiny import opened

pytestmark = pytest.mark.slow

CONFIG = ServerConfig(port=0, log_requests=False)


def test_port_in_use_is_refused() -> None:
    with bind(CONFIG) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            SettingError, match=rf"^port {port}: another program listens on 127\.0\.0\.1:{port}; set port"
        ):
            bind(ServerConfig(port=port))


async def test_server_answers_on_a_unix_socket(tiny_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    config = ServerConfig(uds=str(path), log_requests=False)
    ready = asyncio.Event()
    with bind(config) as listening:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        hooks: Any = {"on_listening": lambda: None, "on_ready": lambda _: ready.set()}
        model = partial(opened, tiny_directory, config)
        serving = asyncio.create_task(serve(config, listening, model, max_running=4, **hooks))
        await ready.wait()
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with httpx2.AsyncClient(transport=transport, base_url="http://server.sock", timeout=60) as client:
            body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            reply = await client.post("/v1/completions", json=body)
            assert reply.json()["usage"]["completion_tokens"] == 3
            client.headers["host"] = "rebound.example"  # no web page reaches the socket
            assert (await client.get("/v1/models")).status_code == 200
        signal.raise_signal(signal.SIGTERM)
        assert await serving == 0
    assert not path.exists()


def test_unix_socket_of_a_running_server_is_refused_and_of_an_ended_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    config = ServerConfig(uds=str(path))
    with bind(config), pytest.raises(SettingError, match=r"server\.sock: another program listens on it") as refused:
        bind(config)
    assert refused.value.fields == ("uds",) and path.exists()
    bind(config).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(SettingError, match=r"cannot listen on it: Address already in use"):
        bind(config)
    assert path.read_text() == "mine"
    for unusable in (tmp_path / "absent" / "s", tmp_path / ("x" * 200)):
        with pytest.raises(SettingError, match=r"^uds .*: cannot listen on it: "):
            bind(ServerConfig(uds=str(unusable)))


async def test_port_is_open_before_model_is_loaded(tiny_directory: Path) -> None:
    may_load = threading.Event()

    def slowly() -> LoadedModel:
        assert may_load.wait(60)
        return opened(tiny_directory, CONFIG)

    async def look(url: str, ready: asyncio.Event) -> list[tuple[int, str]]:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            before = await client.get("/health")
            may_load.set()
            await ready.wait()
            after = await client.get("/health")
        return [(reply.status_code, reply.json()["status"]) for reply in (before, after)]

    sys.setswitchinterval(5e-3)
    listens, ready = asyncio.Event(), asyncio.Event()
    with bind(CONFIG) as listening:
        hooks: Any = {"on_listening": listens.set, "on_ready": lambda _: ready.set()}
        serving = asyncio.create_task(serve(CONFIG, listening, slowly, max_running=4, **hooks))
        await listens.wait()
        assert sys.getswitchinterval() < 1e-3, "busy threads give way to the event loop ten times as often"
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert await look(url, ready) == [(503, "loading"), (200, "ok")]
        signal.raise_signal(signal.SIGTERM)
        assert await serving == 0


@pytest.mark.parametrize("when", ["at once", "later"])
def test_failed_listener_shuts_down(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    ready, listened = asyncio.Event(), list[bool]()

    async def broken(self: Listener, sockets: Any = None) -> None:
        self.started = when == "later"
        if when == "later":
            await ready.wait()
        raise OSError("the listener is lost")

    async def main() -> None:
        with bind(CONFIG) as listening:
            await serve(
                CONFIG,
                listening,
                lambda: opened(tiny_directory, CONFIG),
                max_running=4,
                on_listening=lambda: listened.append(True),
                on_ready=on_ready,
            )

    def on_ready(_: LoadedModel) -> None:
        ready.set()

    monkeypatch.setattr(Listener, "serve", broken)
    with pytest.raises(OSError, match="the listener is lost"):
        asyncio.run(main())
    assert listened == [True] * (when == "later")
    for thread in threading.enumerate():
        if thread.name == "engine":  # a loading engine ends after loading
            thread.join(60)
            assert not thread.is_alive()


async def test_the_second_signal_forces_a_shutdown() -> None:
    shutdown = Shutdown()
    for forced in (False, True):
        shutdown.on_signal()
        assert (shutdown.requested.is_set(), shutdown.forced.is_set()) == (True, forced)


async def test_a_signal_ends_work_that_has_not_ended_before() -> None:
    async def fail() -> None:
        raise OSError("no model")

    shutdown = Shutdown()
    assert await shutdown.comes_after(asyncio.sleep(0)) is True
    with pytest.raises(OSError, match="no model"):
        await shutdown.comes_after(fail())
    endless = asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(shutdown.on_signal)
    assert await shutdown.comes_after(endless) is False
    with pytest.raises(asyncio.CancelledError):
        await endless
