"""The `serve` process: listens at once, loads the model, handles signals, drains and stops.

The first SIGTERM or SIGINT refuses new requests and gives open ones `shutdown_timeout` seconds to finish; the second
aborts open requests. SIGHUP, which a closing terminal may send more than once, counts only as a first signal.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig, SettingError
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.security import KeyRing, load_keys
from nano_inference.server.unix_socket import bind_unix, remove_socket

Open = Callable[[], LoadedModel]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SEND_BUFFER = 128 << 10
"""Bytes of unread replies that the kernel buffers per connection; Linux doubles it, and defaults to up to 4 MB."""
_POLL_S = 0.05
_CLOSING_S = 1.0
_SWITCH_S = 5e-4
"""Seconds after which a thread of Python gives way to another: a tenth of the default, so that the event loop answers
while several threads render templates."""
_log = logging.getLogger("nano_inference.server")


class Listener(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class Shutdown:
    """Shutdown events: set by signals, awaited by `serve`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Install the signal handlers."""
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            # A closing terminal and its shell both send SIGHUP, so a second one forces nothing.
            loop.add_signal_handler(signal.SIGHUP, self.requested.set)

    def on_signal(self) -> None:
        """Request shutdown; on the second signal, force it."""
        (self.forced if self.requested.is_set() else self.requested).set()


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket. Raises `SettingError` if the address cannot be used."""
    if config.uds is not None:
        return bind_unix(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio disables Nagle's algorithm, which delays the end of a response by 40 ms, only if the protocol is given.
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
    """Return the error of an address that cannot be used."""
    address = f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        text = (
            f"port {config.port}: another program listens on {address}; set port to another one, or 0 for any free port"
        )
        return SettingError(text, "port", "port")
    if error.errno == errno.EACCES:
        text = f"port {config.port}: this user may not listen on {address}; set port to 1024 or more"
        return SettingError(text, "port", "port")
    return SettingError(f"host {config.host}: cannot listen on it: {error.strerror or error}", "host")


async def serve(
    config: ServerConfig,
    listening: socket.socket,
    open_model: Open,
    *,
    max_running: int,
    on_listening: Callable[[], None],
    on_ready: Callable[[LoadedModel], None],
) -> int:
    """Serve until a signal; return the exit code, 1 if the engine failed.

    `max_running`: limit of concurrently running samples. `on_listening` is called when connections are accepted and
    signal handlers installed, `on_ready` when the model is loaded. Raises what `open_model` raises.
    """
    sys.setswitchinterval(_SWITCH_S)
    link = EngineLink(step_timeout=config.step_timeout)
    keys = KeyRing.of(load_keys(config), is_shared=config.share_prefix_cache)
    policy = guard_policy(config, keys)
    app = App(config, policy, link, installed_dialects())
    listener = Listener(uvicorn_config(app.asgi, config, policy))
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()
    shutdown.handle_signals(loop)
    serving = loop.create_task(listener.serve(sockets=[listening]))
    serving.add_done_callback(lambda _: shutdown.requested.set())  # a failed listener ends the process
    try:
        while not (listener.started or serving.done()):
            await asyncio.sleep(_POLL_S / 10)
        if listener.started:
            on_listening()
        if await _load(app, link, open_model, shutdown, max_running, on_ready):
            await _until_end(link, shutdown, exit_on_failure=config.exit_on_failure)
            await _drain(link, shutdown, config.shutdown_timeout)
    finally:
        # Waiting longer would not help for a model that is loading or a step that hangs.
        is_orderly = link.state == "draining" and not shutdown.forced.is_set()
        if config.uds is not None:  # before the listener closes: a server that starts then makes its own file
            remove_socket(config.uds)
        try:
            await close_listener(listener, serving)
        finally:
            await link.stop(timeout=10.0 if is_orderly else 0.5)
            app.close()
    return 1 if link.state == "dead" else 0


async def _load(
    app: App,
    link: EngineLink,
    open_model: Open,
    shutdown: Shutdown,
    max_running: int,
    on_ready: Callable[[LoadedModel], None],
) -> bool:
    """Load the model and accept requests; return False if shutdown was requested first."""
    loading = asyncio.ensure_future(link.start(open_model))
    requested = asyncio.ensure_future(shutdown.requested.wait())
    await asyncio.wait({loading, requested}, return_when=asyncio.FIRST_COMPLETED)
    requested.cancel()
    if not loading.done():
        loading.cancel()
        return False
    opened = loading.result()
    # These objects live until the end; scanning them takes tenths of a second in each full collection and at exit.
    gc.collect()
    gc.freeze()
    app.serve(opened, max_running)
    on_ready(opened)
    return True


async def _until_end(link: EngineLink, shutdown: Shutdown, *, exit_on_failure: bool) -> None:
    """Wait for a signal, or with `exit_on_failure` for a failure of the engine."""
    while not shutdown.requested.is_set():
        if exit_on_failure and link.state == "dead":
            return
        try:
            async with asyncio.timeout(1.0 if exit_on_failure else None):
                await shutdown.requested.wait()
        except TimeoutError:
            pass


async def _drain(link: EngineLink, shutdown: Shutdown, timeout: float) -> None:
    """Wait up to `timeout` seconds for open requests, then abort the rest."""
    link.drain()
    if link.num_open and timeout and not shutdown.forced.is_set():
        _log.warning("%d open requests have %g seconds to finish; another signal aborts them", link.num_open, timeout)
    deadline = asyncio.get_running_loop().time() + timeout
    while link.num_open and not shutdown.forced.is_set() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
    if link.num_open:
        _log.warning("%d open requests are aborted", link.num_open)
    link.abort_all()


async def close_listener(listener: Listener, serving: asyncio.Task[None]) -> None:
    """Let uvicorn close its connections; abort those still open after `_CLOSING_S`."""
    listener.should_exit = True
    try:
        async with asyncio.timeout(_CLOSING_S):
            await asyncio.shield(serving)
    except TimeoutError:
        listener.force_exit = True
        for connection in tuple(listener.server_state.connections):
            connection.transport.abort()
        await serving
