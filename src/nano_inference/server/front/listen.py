"""`serve_front`: listens for an application that forwards to other servers, handles signals, drains and stops.

Signals are those of `server.run`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from nano_inference.server.app import strip_root_path
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import error_bodies
from nano_inference.server.guard import Guard, GuardPolicy
from nano_inference.server.log import log_access, record_of
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, Shutdown, close_listener
from nano_inference.server.unix_socket import remove_socket
from nano_inference.server.wiring import installed_dialects

_POLL_S = 0.02
_log = logging.getLogger("nano_inference.server")


class Front(Protocol):
    """An ASGI application that forwards requests to servers which it owns."""

    is_draining: bool  # True: it refuses new requests

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def open(self) -> None:
        """Start the servers; return when they accept requests. May be cancelled."""

    async def run(self) -> None:
        """Never return; raise an exception when the servers are lost for good. May be cancelled."""

    async def close(self) -> None:
        """End the servers."""


async def serve_front(
    config: ServerConfig,
    listening: socket.socket,
    front: Front,
    policy: GuardPolicy,
    *,
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
) -> int:
    """Serve until a signal; return 0. Raises what `listen.open` and `listen.run` raise."""
    shutdown, loop = Shutdown(), asyncio.get_running_loop()
    shutdown.handle_signals(loop)
    guard = Guard(front, policy, log_response, error_bodies(installed_dialects()))
    listener = Listener(uvicorn_config(strip_root_path(config.root_path, guard), config, policy))
    serving = loop.create_task(listener.serve(sockets=[listening]))
    serving.add_done_callback(lambda _: shutdown.requested.set())  # a failed listener ends the process
    try:
        on_listening()
        if await _finishes(front.open(), shutdown):
            on_ready()
            await _finishes(front.run(), shutdown)
        await _drain(front, shutdown, config.shutdown_timeout)
    finally:
        if config.uds is not None:  # before the listener closes: a server that starts then makes its own file
            remove_socket(config.uds)
        await close_listener(listener, serving)
        await front.close()
    return 0


async def _finishes(work: Coroutine[Any, Any, None], shutdown: Shutdown) -> bool:
    """Wait for `work`; return False if shutdown was requested first, which cancels it. Raises what it raises."""
    opening = asyncio.ensure_future(work)
    requested = asyncio.ensure_future(shutdown.requested.wait())
    await asyncio.wait({opening, requested}, return_when=asyncio.FIRST_COMPLETED)
    requested.cancel()
    if not opening.done():
        opening.cancel()
        return False
    opening.result()
    return True


async def _drain(front: Front, shutdown: Shutdown, timeout: float) -> None:
    """Refuse new requests; wait up to `timeout` seconds for open ones."""
    front.is_draining = True
    deadline = time.monotonic() + timeout
    while front.num_open and not shutdown.forced.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    if front.num_open:
        _log.warning("%d open requests are aborted", front.num_open)


def log_response(scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
    """Log a finished request."""
    log_access(record_of(scope, status, seconds, error))
