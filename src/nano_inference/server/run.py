"""From start to stop: the `serve` process, and `HostedApp` for a process that already has an HTTP server.

`serve` listens at once, loads the model, handles signals, drains and stops. The first SIGTERM or SIGINT refuses new
requests and gives open ones `shutdown_timeout` seconds to finish; the second aborts open requests. SIGHUP, which a
closing terminal may send more than once, counts only as a first signal.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import resolve, served_name
from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig, SettingError
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.security import KeyRing, load_keys

Open = Callable[[], LoadedModel]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SEND_BUFFER = 128 << 10
"""Bytes of unread replies that the kernel buffers per connection; Linux doubles it, and defaults to up to 4 MB."""
_POLL_S = 0.05
_CLOSING_S = 1.0
_SWITCH_S = 5e-4
"""Seconds after which a thread of Python gives way to another: a tenth of the default, so that the event loop answers
while several threads render templates."""
OF_THE_LISTENER = (
    *("port", "uds", "max_connections", "keep_alive_timeout", "write_timeout", "log_requests", "exit_on_failure"),
    *("replicas", "workers", "further_model", "models_memory", "max_loaded_models"),
)
"""Fields of `ServerConfig` for a process that listens itself; another host has options of its own."""
_log = logging.getLogger("nano_inference.server")


class Listener(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Shutdown:
    """Shutdown events: set by signals, awaited by `serve`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            # A closing terminal and its shell both send SIGHUP, so a second one forces nothing.
            loop.add_signal_handler(signal.SIGHUP, self.requested.set)

    def on_signal(self) -> None:
        """Request shutdown; on the second signal, force it."""
        (self.forced if self.requested.is_set() else self.requested).set()

    async def comes_after(self, work: Awaitable[object]) -> bool:
        """Wait for `work`; return False if shutdown was requested first, which cancels it. Raises what it raises."""
        working, requested = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        await asyncio.wait({working, requested}, return_when=asyncio.FIRST_COMPLETED)
        requested.cancel()
        if working.done():
            working.result()
            return True
        working.cancel()
        return False


@asynccontextmanager
async def listening_for(
    app: ASGIApp, config: ServerConfig, policy: GuardPolicy, listening: socket.socket, shutdown: Shutdown
) -> AsyncIterator[bool]:
    """Serve an application on a socket while the block runs, and handle signals. Yields False if it cannot start."""
    loop = asyncio.get_running_loop()
    listener = Listener(uvicorn_config(app, config, policy))
    shutdown.handle_signals(loop)
    serving = loop.create_task(listener.serve(sockets=[listening]))
    serving.add_done_callback(lambda _: shutdown.requested.set())  # a failed listener ends the process
    try:
        while not (listener.started or serving.done()):
            await asyncio.sleep(_POLL_S / 10)
        yield listener.started
    finally:
        if config.uds is not None:  # before the listener closes: a server that starts then makes its own file
            remove_socket(config.uds)
        await close_listener(listener, serving)


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket. Raises `SettingError` if the address cannot be used, or another program has it."""
    if config.uds is not None:
        return _bind_unix(config.uds)
    is_v6 = ":" in config.host
    # asyncio disables Nagle's algorithm, which delays the end of a response by 40 ms, only if the protocol is given.
    listening = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
        listening.bind((config.host, config.port))
        listening.listen()  # two sockets may be bound to one port, but only one may listen
        return listening
    except OSError as error:
        listening.close()
        port = f"port {config.port}"
        address = f"[{config.host}]:{config.port}" if is_v6 else f"{config.host}:{config.port}"
        if error.errno == errno.EADDRINUSE:
            text = f"{port}: another program listens on {address}; set port to another one, or 0 for any free port"
            raise SettingError(text, "port", "port") from None
        if error.errno == errno.EACCES:
            text = f"{port}: this user may not listen on {address}; set port to 1024 or more"
            raise SettingError(text, "port", "port") from None
        text = f"host {config.host}: cannot listen on it: {error.strerror or error}"
        raise SettingError(text, "host") from None


def _bind_unix(path: str) -> socket.socket:
    """Return a socket to which only the file's owner may connect; replace a file whose server has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            remove_socket(path)
        except (OSError, ValueError):  # no such file, or one that `bind` refuses by its reason
            pass
        else:
            raise SettingError(f"uds {path}: another program listens on it", "uds")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        Path(path).chmod(stat.S_IRUSR | stat.S_IWUSR)  # before `listen`: no connection is accepted until then
        listening.listen()
        return listening
    except (OSError, ValueError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError(f"uds {path}: cannot listen on it: {reason}", "uds") from None


def remove_socket(path: str) -> None:
    """Delete a socket file; another file stays."""
    with suppress(OSError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            Path(path).unlink()


def make_app(config: ServerConfig, link: EngineLink) -> App:
    """Return the application of a configuration with all installed dialects. Raises `ValueError`, `PluginError`."""
    keys = KeyRing.of(load_keys(config), is_shared=config.share_prefix_cache)
    return App(config, guard_policy(config, keys), link, installed_dialects())


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
    link, shutdown = EngineLink(step_timeout=config.step_timeout), Shutdown()
    app = make_app(config, link)
    try:
        async with listening_for(app.asgi, config, app.guard.policy, listening, shutdown) as is_listening:
            if is_listening:
                on_listening()
            loading = asyncio.ensure_future(link.start(open_model))
            if await shutdown.comes_after(loading):
                opened = loading.result()
                # These objects live until the end; scanning them takes tenths of a second in each full collection and
                # at exit.
                gc.collect()
                gc.freeze()
                app.serve(opened, max_running)
                on_ready(opened)
                while not (shutdown.requested.is_set() or (config.exit_on_failure and link.state == "dead")):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0 if config.exit_on_failure else None):
                            await shutdown.requested.wait()
                await drain(link, config.shutdown_timeout, shutdown.forced)
    finally:
        # Waiting longer would not help for a model that is loading or a step that hangs.
        is_orderly = link.state == "draining" and not shutdown.forced.is_set()
        await link.stop(timeout=10.0 if is_orderly else 0.5)
        app.close()
    return 1 if link.state == "dead" else 0


async def drain(link: EngineLink, timeout: float, forced: asyncio.Event) -> None:
    """Wait up to `timeout` seconds for open requests, or until `forced` is set; abort the rest."""
    link.drain()
    if link.num_open and timeout and not forced.is_set():
        _log.warning("%d open requests have %g seconds to finish; another signal aborts them", link.num_open, timeout)
    deadline = asyncio.get_running_loop().time() + timeout
    while link.num_open and not forced.is_set() and asyncio.get_running_loop().time() < deadline:
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


class HostedApp:
    """An ASGI application that owns an engine: the host's lifespan loads the model, and drains and closes the engine.

    `server.host` is the address that the host listens on: keys are required and Host headers checked as for
    `nano-inference serve`. Limits on connections, headers and slow readers are the host's.
    """

    def __init__(self, engine: EngineConfig, server: ServerConfig, cache: Path) -> None:
        """`cache` is the directory of fetched models. Raises `ValueError` naming a field of `OF_THE_LISTENER`."""
        default = ServerConfig()
        given = next((one for one in OF_THE_LISTENER if getattr(server, one) != getattr(default, one)), None)
        if given is not None:
            raise ValueError(f"{given}: has no effect in another ASGI server, only in nano-inference serve")
        self._engine = engine
        self._config = server
        self._cache = cache
        self._app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or follow the host's lifespan.

        Raises `RuntimeError` for a request before the lifespan has started.
        """
        if scope["type"] == "lifespan":
            await self._follow(receive, send)
        elif self._app is None:
            raise RuntimeError("the model is not loaded: enable lifespan events in the ASGI server")
        else:
            await self._app.asgi(scope, receive, send)

    async def open(self) -> LoadedModel:
        """Load the model and accept requests; return it. Raises what `load.open_model` raises."""
        from nano_inference.server.load import open_model  # imports torch

        name = self._engine.model_path
        self._app = app = make_app(self._config, EngineLink(step_timeout=self._config.step_timeout))

        def load() -> LoadedModel:
            path = resolve(name, self._cache)
            return open_model(self._engine, self._config, name=served_name(name, path), path=path)

        opened = await app.link.start(load)
        app.serve(opened, self._engine.max_batch_size)
        return opened

    async def close(self) -> None:
        """Wait up to `shutdown_timeout` seconds for open requests, abort the rest, and close the engine."""
        if self._app is not None:
            await drain(self._app.link, self._config.shutdown_timeout, asyncio.Event())
            await self._app.link.stop()
            self._app.close()

    async def _follow(self, receive: Receive, send: Send) -> None:
        """Load at the host's start and close at its end; report a failure of either."""
        for event, act in (("startup", self.open), ("shutdown", self.close)):
            await receive()
            try:
                await act()
            except Exception as error:
                if self._app is not None:
                    await self._app.link.stop(0.5)
                    self._app.close()
                text = " ".join(str(error).split()) or type(error).__name__
                await send({"type": f"lifespan.{event}.failed", "message": text})
                return
            await send({"type": f"lifespan.{event}.complete"})
