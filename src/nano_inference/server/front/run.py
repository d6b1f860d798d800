"""The process in front of replicas or of several models.

SIGUSR1 starts a rolling restart of replicas; other signals are those of `server.run`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from nano_inference.config import EngineConfig
from nano_inference.server.app import installed_dialects, strip_root_path
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import error_bodies, stream_errors
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.front import Front, Replicas
from nano_inference.server.front.models import Models
from nano_inference.server.front.servers import MemoryLimits, Server, Servers
from nano_inference.server.front.trainers import Trainers, keys_of_replicas
from nano_inference.server.guard import Guard, GuardPolicy
from nano_inference.server.log import log_access, record_of
from nano_inference.server.run import Shutdown, listening_for
from nano_inference.server.security import is_loopback_name, load_keys
from nano_inference.server.trainers.places import weights_root
from nano_inference.support.files import path_of

_SPARE_CONNECTIONS = 64
_POLL_S = 0.02
_SHARE = 0.8  # part of the memory that is free at the start: the default of `models_memory`
_log = logging.getLogger("nano_inference.server")


def setup_of(
    engine: EngineConfig, config: ServerConfig, policy: GuardPolicy, names: tuple[str, ...], cache: Path
) -> dict[str, Any]:
    """Return the setup of one server (`process.main`) from the configuration of the whole.

    The front checks hosts and origins and logs requests; it passes the keys on, as values, since the server's machine
    may lack the file. Raises `ValueError` if `weights_dir` is not a directory.
    """
    root = weights_root(config.weights_dir)
    modules = [module.partition("=") for module in config.lora_modules]
    own = replace(
        config,
        host="127.0.0.1",
        port=0,
        uds=None,
        root_path="",
        replicas=None,
        further_model=(),
        models_memory=None,
        max_loaded_models=None,
        served_model_name=names if config.further_model else config.served_model_name,
        api_key=load_keys(config),
        api_key_file=None,
        admin_key=keys_of_replicas(config, policy),
        admin_key_file=None,
        weights_dir=None if root is None else str(root),
        lora_modules=tuple(f"{name}={path_of(path, 'lora_modules').absolute()}" for name, _, path in modules),
        allowed_host=(),
        cors_origin=(),
        trusted_proxy=("127.0.0.0/8", "::1", *config.trusted_proxy),
        client_share=policy.client_share,
        max_connections=config.max_connections + _SPARE_CONNECTIONS,
        exit_on_failure=True,
        log_requests=False,
    )
    return {"engine": engine.to_dict(), "server": own.to_dict(), "name": names[0], "cache": str(cache.absolute())}


def check_remote(config: ServerConfig, policy: GuardPolicy) -> None:
    """Raise `ValueError` if replicas on other machines would be open to everybody there."""
    if config.insecure or not is_loopback_name(config.host):
        return
    rings = {"api_key_file": policy.keys, **({"admin_key_file": policy.admins} if config.takes_commands else {})}
    for name, ring in rings.items():
        if ring.is_empty:
            raise ValueError(f"replicas on several machines can be reached from outside: set {name}, or insecure")


def limits_of(config: ServerConfig) -> MemoryLimits:
    return MemoryLimits(config.models_memory or int(_SHARE * free_memory()), config.max_loaded_models)


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


async def serve_front(
    config: ServerConfig,
    policy: GuardPolicy,
    listening: socket.socket,
    behind: Sequence[Server],
    limits: MemoryLimits | None = None,
    *,
    watch: Callable[[], Awaitable[object]],
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
) -> int:
    """Serve what is behind, models if there are `limits`, until a signal; return 0.

    Raises `ServerFailed` if a server cannot start at first, and what `watch` raises.
    """
    shutdown, loop = Shutdown(), asyncio.get_running_loop()
    dialects = installed_dialects()
    async with make_client() as client:
        servers = Servers(behind, client, limits=limits, drain_timeout=config.shutdown_timeout)
        kind: Replicas | Models = Replicas(servers)
        if limits is not None:
            kind = Models(servers, client, dialects, config, needs_key=not policy.keys.is_empty)
        trainers = Trainers(servers, client, config, policy) if config.takes_commands else None
        if config.replicas:
            loop.add_signal_handler(signal.SIGUSR1, servers.restart_all)
        front = Front(servers, kind, client, policy, stream_errors(dialects), config.request_timeout, trainers)
        guard = Guard(front, policy, lambda *done: log_access(record_of(*done)), error_bodies(dialects))
        app = strip_root_path(config.root_path, guard)
        try:
            async with listening_for(app, config, policy, listening, shutdown) as is_listening:
                if is_listening:
                    on_listening()
                if await shutdown.comes_after(servers.open()):
                    on_ready()
                    await shutdown.comes_after(watch())
                front.is_draining = True
                deadline = time.monotonic() + config.shutdown_timeout
                while servers.num_open and not shutdown.forced.is_set() and time.monotonic() < deadline:
                    await asyncio.sleep(_POLL_S)
                if servers.num_open:
                    _log.warning("%d open requests are aborted", servers.num_open)
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
            await servers.close()
    return 0
