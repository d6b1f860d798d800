"""The proxy in front of given URLs, on a real socket in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from nano_inference.server.app import guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import stream_errors
from nano_inference.server.front import front
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.placement import Placement
from nano_inference.server.front.servers import Server, Servers, State
from nano_inference.server.front.trainers import Trainers
from nano_inference.server.guard import Guard
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, bind
from nano_inference.server.security import KeyRing, load_keys
from tests.server.tiny import close


class CountingServers(Servers):
    """Also lists the index of each server that was chosen, and sets states from outside."""

    def __init__(self, servers: Sequence[Server], client: httpx2.AsyncClient) -> None:
        super().__init__(servers, client)
        self.placed: list[int] = []

    def place(self, placement: Placement, among: Sequence[Server]) -> Server:
        server = super().place(placement, among)
        self.placed.append(self.all.index(server))
        return server

    def set_state(self, index: int, state: State) -> None:
        self.all[index].state = state


@dataclass
class Front:
    """A running proxy."""

    url: str
    servers: CountingServers
    proxy: front.Front
    loop: asyncio.AbstractEventLoop
    client: httpx2.Client
    trainers: Trainers | None

    def on_loop(self, work: Any) -> Any:
        """Return `work()`, run on the proxy's event loop."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)


@contextmanager
def proxied(
    urls: Sequence[str], *, replicas: Sequence[Server] = (), checks_health: bool = False, **settings: Any
) -> Iterator[Front]:
    """Serve a proxy for these URLs, or for replicas with trainers' routes, while the block runs.

    `settings` are fields of `ServerConfig`.
    """
    settings |= {"replicas": len(replicas), "enable_rl": True} if replicas else {"workers": tuple(urls)}
    config = ServerConfig(port=0, log_requests=False, **settings)
    listening = bind(config)
    ready: list[Front] = []
    came_up, leave = threading.Event(), threading.Event()

    async def main() -> None:
        policy = guard_policy(config, KeyRing.of(load_keys(config)))
        async with make_client() as client:
            behind = [Server(names=(f"worker {n}",), url=url, state="ready") for n, url in enumerate(config.workers)]
            servers = CountingServers(replicas or behind, client)
            errors = stream_errors(installed_dialects())
            trainers = Trainers(servers, client, config, policy) if replicas else None
            proxy = front.Front(servers, front.Replicas(servers), client, policy, errors, 60, trainers)
            listener = Listener(uvicorn_config(Guard(proxy, policy), config, policy))
            serving = asyncio.create_task(listener.serve(sockets=[listening]))
            if checks_health or replicas:
                await servers.open()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            http = httpx2.Client(base_url=url, timeout=60, verify=False)
            ready.append(Front(url, servers, proxy, asyncio.get_running_loop(), http, trainers))
            came_up.set()
            await asyncio.to_thread(leave.wait)
            await servers.close()
            await close(listener, serving)

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="proxy")
    thread.start()
    assert came_up.wait(30)
    try:
        yield ready[0]
    finally:
        ready[0].client.close()
        leave.set()
        thread.join(60)
