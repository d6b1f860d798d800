"""The process in front of replicas or of several models.

SIGUSR1 starts a rolling restart of replicas; other signals are those of `server.run`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
from starlette.types import Receive, Scope, Send

from nano_inference.config import EngineConfig
from nano_inference.server.app import strip_root_path
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import error_bodies, stream_errors
from nano_inference.server.front.child import ServerProcess
from nano_inference.server.front.fleet import Fleet
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.models import MemoryLimits, ModelEntry, Models
from nano_inference.server.front.models_front import ModelsFront
from nano_inference.server.front.replicas import Proxy
from nano_inference.server.front.supervisor import Start, Supervisor, Watch, forever
from nano_inference.server.guard import Guard, GuardPolicy
from nano_inference.server.hosts import is_loopback_name
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.log import log_access, record_of
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, Shutdown, close_listener
from nano_inference.server.unix_socket import remove_socket
from nano_inference.server.wiring import guard_policy, installed_dialects

_SPARE_CONNECTIONS = 64
_POLL_S = 0.02
_log = logging.getLogger("nano_inference.server")
_SHARE = 0.8  # part of the memory that is free at the start: the default of `models_memory`


def replica_setup(engine: EngineConfig, config: ServerConfig, *, name: str, cache: str) -> dict[str, Any]:
    """Return the setup of a replica (`process.main`) from the configuration of the whole.

    The proxy checks hosts and origins and logs requests; it passes the keys on, as values, since the replica's machine
    may lack the file.
    """
    policy = guard_policy(config, KeyRing.of(load_keys(config)))
    own = replace(
        config,
        host="127.0.0.1",
        port=0,
        uds=None,
        root_path="",
        replicas=None,
        api_key=load_keys(config),
        api_key_file=None,
        allowed_host=(),
        cors_origin=(),
        trusted_proxy=("127.0.0.0/8", "::1", *config.trusted_proxy),
        client_share=policy.client_share,
        max_connections=config.max_connections + _SPARE_CONNECTIONS,
        exit_on_failure=True,
        log_requests=False,
    )
    return {"engine": engine.to_dict(), "server": own.to_dict(), "name": name, "cache": cache}


async def serve_fleet(
    config: ServerConfig,
    listening: socket.socket,
    start: Start | None,
    *,
    watch: Watch = forever,
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
) -> int:
    """Serve `config.replicas` replicas made by `start`, or those at `config.workers`, until a signal; return 0.

    Raises `ReplicaFailed` if a replica cannot start at first, and what `watch` raises.
    """
    policy = guard_policy(config, KeyRing.of(load_keys(config)))
    async with make_client() as client:
        fleet = Fleet(config.replicas or len(config.workers))
        supervisor = None
        if start is not None:
            supervisor = Supervisor(fleet, start, drain_timeout=config.shutdown_timeout, watch=watch)
        front = Proxy(fleet, client, policy, stream_errors(installed_dialects()), supervisor, config.workers)
        return await serve_front(config, listening, front, policy, on_listening=on_listening, on_ready=on_ready)


def check_remote(config: ServerConfig, policy: GuardPolicy) -> None:
    """Raise `ValueError` if replicas on other machines would be open to everybody there."""
    if policy.keys.is_empty and not config.insecure and is_loopback_name(config.host):
        raise ValueError("replicas on several machines can be reached from outside: set api_key_file, or insecure")


# ---- several models -------------------------------------------------------------------------------------------------


def model_setup(engine: EngineConfig, config: ServerConfig, *, names: tuple[str, ...], cache: str) -> dict[str, Any]:
    """Return the setup of one model's server (`process.main`) from the configuration of the whole."""
    own = replace(config, further_model=(), models_memory=None, max_loaded_models=None, served_model_name=names)
    return replica_setup(engine, own, name=names[0], cache=cache)


def limits_of(config: ServerConfig) -> MemoryLimits:
    """Return what loaded models may use together."""
    num_bytes = config.models_memory or int(_SHARE * free_memory())
    return MemoryLimits(num_bytes, config.max_loaded_models)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that are free, within the limit of the cgroup (a container's) if there is one."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except (OSError, UnicodeDecodeError):
        return available
    return min(available, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def weight_bytes(path: Path) -> int:
    """Return the bytes of a model's weight files, for an estimate: all shards, or the largest of other files."""
    if path.is_file():
        return path.stat().st_size
    shards = [file.stat().st_size for file in path.glob("*.safetensors")]
    others = [file.stat().st_size for ending in ("gguf", "pt", "bin") for file in path.glob(f"*.{ending}")]
    return sum(shards) or max(others, default=0)


async def serve_models(
    config: ServerConfig,
    listening: socket.socket,
    entries: Sequence[ModelEntry],
    limits: MemoryLimits,
    *,
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
) -> int:
    """Serve until a signal; return 0. Raises `ReplicaFailed` if the first model cannot be loaded."""
    policy = guard_policy(config, KeyRing.of(load_keys(config)))
    models = Models(entries, lambda entry: ServerProcess(entry.setup), limits)
    async with make_client() as client:
        front = ModelsFront(
            models,
            client,
            policy,
            installed_dialects(),
            any_model=config.any_model,
            has_pages=config.pages,
            load_timeout=config.request_timeout,
        )
        return await serve_front(config, listening, front, policy, on_listening=on_listening, on_ready=on_ready)


# ---- listening -------------------------------------------------------------------------------------------------------


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
    """Serve until a signal; return 0. Raises what `front.open` and `front.run` raise."""
    shutdown, loop = Shutdown(), asyncio.get_running_loop()
    shutdown.handle_signals(loop)
    guard = Guard(front, policy, lambda *done: log_access(record_of(*done)), error_bodies(installed_dialects()))
    listener = Listener(uvicorn_config(strip_root_path(config.root_path, guard), config, policy))
    serving = loop.create_task(listener.serve(sockets=[listening]))
    serving.add_done_callback(lambda _: shutdown.requested.set())  # a failed listener ends the process
    try:
        on_listening()
        if await _finishes(front.open(), shutdown):
            on_ready()
            await _finishes(front.run(), shutdown)
        front.is_draining = True
        deadline = time.monotonic() + config.shutdown_timeout
        while front.num_open and not shutdown.forced.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if front.num_open:
            _log.warning("%d open requests are aborted", front.num_open)
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
