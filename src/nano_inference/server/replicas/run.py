"""The process in front of the replicas: listens, starts them, handles signals, drains and stops.

Signals are those of `server.run`; SIGUSR1 starts a rolling restart.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.types import Scope

from nano_inference.config import EngineConfig
from nano_inference.server.app import strip_root_path
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import error_bodies
from nano_inference.server.guard import Guard, GuardPolicy
from nano_inference.server.hosts import is_loopback_name
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.log import AccessRecord, log_access
from nano_inference.server.loop_watch import LoopWatchdog
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.replicas.fleet import Fleet
from nano_inference.server.replicas.proxy import Proxy, make_client
from nano_inference.server.replicas.supervisor import HealthCheck, Start, Supervisor
from nano_inference.server.run import Listener, Shutdown, close_listener
from nano_inference.server.wiring import guard_policy, installed_dialects

_POLL_S = 0.02
_SPARE_CONNECTIONS = 64
_log = logging.getLogger("nano_inference.server")


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
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
) -> int:
    """Serve `config.replicas` replicas made by `start`, or those at `config.workers`, until a signal; return 0.

    Raises `ReplicaFailed` if a replica cannot start at first.
    """
    fleet = Fleet(config.replicas or len(config.workers))
    policy = guard_policy(config, KeyRing.of(load_keys(config)))
    shutdown, loop = Shutdown(), asyncio.get_running_loop()
    watchdog = LoopWatchdog(loop).start()
    shutdown.handle_signals(loop)
    async with make_client() as client:
        proxy = Proxy(fleet, client, policy)
        guard = Guard(proxy, policy, log_response, error_bodies(installed_dialects()))
        listener = Listener(uvicorn_config(strip_root_path(config.root_path, guard), config, policy))
        serving = loop.create_task(listener.serve(sockets=[listening]))
        serving.add_done_callback(lambda _: shutdown.requested.set())  # a failed listener ends the process
        supervisor = Supervisor(fleet, start, drain_timeout=config.shutdown_timeout) if start is not None else None
        health = HealthCheck(fleet, client)
        try:
            on_listening()
            if await _open(fleet, supervisor, config, shutdown):
                health.start()
                if supervisor is not None:
                    loop.add_signal_handler(signal.SIGUSR1, supervisor.restart_all)
                on_ready()
                await shutdown.requested.wait()
            await _drain(proxy, fleet, shutdown, config.shutdown_timeout)
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
            await health.close()
            await close_listener(listener, serving)
            if supervisor is not None:
                await supervisor.close()
            watchdog.close()
    return 0


async def _open(fleet: Fleet, supervisor: Supervisor | None, config: ServerConfig, shutdown: Shutdown) -> bool:
    """Start the replicas, or take those that run; return False if shutdown was requested first."""
    if supervisor is None:
        for index, url in enumerate(config.workers):
            fleet.set_ready(index, url)
        return True
    opening = asyncio.ensure_future(supervisor.open())
    requested = asyncio.ensure_future(shutdown.requested.wait())
    await asyncio.wait({opening, requested}, return_when=asyncio.FIRST_COMPLETED)
    requested.cancel()
    if not opening.done():
        opening.cancel()
        return False
    opening.result()
    return True


async def _drain(proxy: Proxy, fleet: Fleet, shutdown: Shutdown, timeout: float) -> None:
    """Refuse new requests; wait up to `timeout` seconds for open ones."""
    proxy.is_draining = True
    deadline = time.monotonic() + timeout
    while fleet.num_open and not shutdown.forced.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    if fleet.num_open:
        _log.warning("%d open requests are aborted", fleet.num_open)


def log_response(scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
    """Log a finished request."""
    log_access(
        AccessRecord(
            ts=time.time(),
            level="error" if status is not None and status >= 500 else "info",
            request_id=scope["state"].get("request_id"),
            method=scope["method"],
            path=scope["path"],
            status=status,
            total_ms=seconds * 1e3,
            client_abort=True if status is None else None,
            error_type=None if error is None else getattr(error, "type", type(error).__name__),
            error_code=getattr(error, "code", None),
        )
    )


def check_remote(config: ServerConfig, policy: GuardPolicy) -> None:
    """Raise `ValueError` if replicas on other machines would be open to everybody there."""
    if policy.keys.is_empty and not config.insecure and is_loopback_name(config.host):
        raise ValueError("replicas on several machines can be reached from outside: set api_key_file, or insecure")
