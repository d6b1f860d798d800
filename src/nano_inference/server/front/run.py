"""The process in front of the replicas. SIGUSR1 starts a rolling restart; other signals are those of `server.run`."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
from starlette.types import Receive, Scope, Send

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import stream_errors
from nano_inference.server.front.fleet import Fleet
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.listen import serve_front
from nano_inference.server.front.replicas import Proxy
from nano_inference.server.front.supervisor import HealthCheck, Start, Supervisor, Watch, forever
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.hosts import is_loopback_name
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.wiring import guard_policy, installed_dialects

_SPARE_CONNECTIONS = 64


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


class FleetFront:
    """The proxy with the supervisor and the health checks of its fleet: see `listen.Front`."""

    def __init__(
        self,
        config: ServerConfig,
        start: Start | None,
        client: httpx2.AsyncClient,
        policy: GuardPolicy,
        watch: Watch = forever,
    ) -> None:
        """`start` makes a replica; None: `config.workers` run already. `watch`: see `Supervisor`."""
        self._config = config
        self._fleet = Fleet(config.replicas or len(config.workers))
        self._proxy = Proxy(self._fleet, client, policy, stream_errors(installed_dialects()))
        self._supervisor = None
        if start is not None:
            self._supervisor = Supervisor(self._fleet, start, drain_timeout=config.shutdown_timeout, watch=watch)
        self._health = HealthCheck(self._fleet, client)

    @property
    def is_draining(self) -> bool:
        """True: new requests are refused."""
        return self._proxy.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._proxy.is_draining = value

    @property
    def num_open(self) -> int:
        """Open requests of all replicas."""
        return self._fleet.num_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._proxy(scope, receive, send)

    async def open(self) -> None:
        """Start the replicas, or take those that run. Raises `ReplicaFailed` if a replica cannot start at first."""
        if self._supervisor is None:
            for index, url in enumerate(self._config.workers):
                self._fleet.set_ready(index, url)
        else:
            await self._supervisor.open()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._supervisor.restart_all)
        self._health.start()

    async def run(self) -> None:
        """See `listen.Front`. Raises `ClusterLost`."""
        await (forever() if self._supervisor is None else self._supervisor.run())

    async def close(self) -> None:
        """End the health checks and the replicas."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        await self._health.close()
        if self._supervisor is not None:
            await self._supervisor.close()


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
        front = FleetFront(config, start, client, policy, watch)
        return await serve_front(config, listening, front, policy, on_listening=on_listening, on_ready=on_ready)


def check_remote(config: ServerConfig, policy: GuardPolicy) -> None:
    """Raise `ValueError` if replicas on other machines would be open to everybody there."""
    if policy.keys.is_empty and not config.insecure and is_loopback_name(config.host):
        raise ValueError("replicas on several machines can be reached from outside: set api_key_file, or insecure")
