"""The process of `serve`: a socket that listens at once, a model that is loaded behind it, signals, and the end.

The first SIGTERM or SIGINT lets open requests finish, within `shutdown_timeout`, and refuses new ones; the second one
aborts what is open. SIGHUP, which a terminal sends more than once when it goes, counts as the first only.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from nano_inference.config import ServerConfig, SettingError
from nano_inference.server.accepting import Acceptor
from nano_inference.server.app import App
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.loop_watch import LoopWatchdog
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.served import LoadedModel
from nano_inference.server.wiring import guard_policy, installed_dialects, make_app

Open = Callable[[], LoadedModel]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SEND_BUFFER = 128 << 10
"""Bytes of a reply that the kernel keeps for a client that does not read; Linux doubles them, and would take 4 MB."""
_POLL_S = 0.05
_CLOSING_S = 1.0
_log = logging.getLogger("nano_inference.server")


class Listener(uvicorn.Server):
    """uvicorn's server, which leaves the signals to `serve` and the taking of connections to `Acceptor`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections from sockets that listen."""
        self.servers = []
        loop = asyncio.get_running_loop()
        for one in sockets or []:
            acceptor = Acceptor(loop, one, self._make_protocol)
            acceptor.start()
            self.acceptors.append(acceptor)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and close those that there are."""
        for acceptor in self.acceptors:
            await acceptor.close()
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Shutdown:
    """How far the end has come: signals set it, `serve` waits for it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urged = asyncio.Event()

    def on_signal(self) -> None:
        """Ask for the end; asked again, urge it."""
        (self.urged if self.asked.is_set() else self.asked).set()

    def on_hangup(self) -> None:
        """Ask for the end; a terminal that goes sends the signal itself, and its shell once more."""
        self.asked.set()


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket. Raises `SettingError` for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off, which would keep an answer's end for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
        listening.bind((config.host, config.port))
        listening.listen()  # two sockets may be bound to one port, but only one may listen
    except OSError as error:
        listening.close()
        raise _unusable(config, error) from None
    return listening


def _unusable(config: ServerConfig, error: OSError) -> SettingError:
    """Return what is wrong with an address, and what to do."""
    address = f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        text = f"port {config.port}: another program listens on {address}; set port to another one, or 0 for a free one"
        return SettingError(text, "port", "port")
    if error.errno == errno.EACCES:
        text = f"port {config.port}: this user may not listen on {address}; set port to 1024 or more"
        return SettingError(text, "port", "port")
    return SettingError(f"host {config.host} cannot be listened on: {error.strerror or error}", "host")


async def serve(
    config: ServerConfig,
    listening: socket.socket,
    open_model: Open,
    *,
    max_running: int,
    on_listening: Callable[[], None],
    on_ready: Callable[[LoadedModel], None],
) -> int:
    """Serve until a signal; return the exit code, which is 1 when the engine failed.

    `max_running` samples may run at once. `on_listening` is called once connections are taken and signals heeded,
    `on_ready` once the model is there. Raises what `open_model` raised.
    """
    link = EngineLink(step_timeout=config.step_timeout)
    keys = KeyRing.of(load_keys(config), is_shared=config.share_prefix_cache)
    policy = guard_policy(config, keys)
    app = make_app(config, policy, link, installed_dialects())
    listener = Listener(uvicorn_config(app.asgi, config, policy))
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()
    watchdog = LoopWatchdog(loop).start()
    for number in _SIGNALS:
        loop.add_signal_handler(number, shutdown.on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        loop.add_signal_handler(signal.SIGHUP, shutdown.on_hangup)
    serving = loop.create_task(listener.serve(sockets=[listening]))
    serving.add_done_callback(lambda _: shutdown.asked.set())  # without its listener the process has no use
    try:
        while not (listener.started or serving.done()):
            await asyncio.sleep(_POLL_S / 10)
        if listener.started:
            on_listening()
        if await _load(app, link, open_model, shutdown, max_running, on_ready):
            await _until_end(link, shutdown, exit_on_failure=config.exit_on_failure)
            await _drain(link, shutdown, config.shutdown_timeout)
    finally:
        # A load, or a step that is stuck, would not be done in time however long one waits.
        is_orderly = link.state == "draining" and not shutdown.urged.is_set()
        try:
            await _end(listener, serving)
        finally:
            await link.stop(timeout=10.0 if is_orderly else 0.5)
            app.close()
            watchdog.close()
    return 1 if link.state == "dead" else 0


async def _load(
    app: App,
    link: EngineLink,
    open_model: Open,
    shutdown: Shutdown,
    max_running: int,
    on_ready: Callable[[LoadedModel], None],
) -> bool:
    """Load the model and open the doors; whether that was done before the end was asked for."""
    loading = asyncio.ensure_future(link.start(open_model))
    asked = asyncio.ensure_future(shutdown.asked.wait())
    await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not loading.done():
        loading.cancel()
        return False
    opened = loading.result()
    # What is there now stays. Looking through all of it costs tenths of a second at each full collection, and at exit.
    gc.collect()
    gc.freeze()
    app.serve(opened, max_running)
    on_ready(opened)
    return True


async def _until_end(link: EngineLink, shutdown: Shutdown, *, exit_on_failure: bool) -> None:
    """Wait for a signal, or for the engine's death when the process is to end with it."""
    while not shutdown.asked.is_set():
        if exit_on_failure and link.state == "dead":
            return
        try:
            async with asyncio.timeout(1.0 if exit_on_failure else None):
                await shutdown.asked.wait()
        except TimeoutError:
            pass


async def _drain(link: EngineLink, shutdown: Shutdown, timeout: float) -> None:
    """Let open requests finish while there is time; then tell those that are left."""
    link.drain()
    if link.num_open and timeout and not shutdown.urged.is_set():
        _log.warning("%d open requests have %g seconds to end; another signal aborts them", link.num_open, timeout)
    deadline = asyncio.get_running_loop().time() + timeout
    while link.num_open and not shutdown.urged.is_set() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
    if link.num_open:
        _log.warning("%d open requests are aborted", link.num_open)
    link.abort_all()


async def _end(listener: Listener, serving: asyncio.Task[None]) -> None:
    """Let uvicorn close its connections; those that do not let themselves be closed are cut."""
    listener.should_exit = True
    try:
        async with asyncio.timeout(_CLOSING_S):
            await asyncio.shield(serving)
    except TimeoutError:
        listener.force_exit = True
        for connection in tuple(listener.server_state.connections):
            connection.transport.abort()
        await serving
