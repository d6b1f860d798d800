"""The proxy in front of given URLs, on a real socket in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import stream_errors
from nano_inference.server.front.fleet import Fleet
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.placement import Placement
from nano_inference.server.front.replicas import Proxy
from nano_inference.server.front.supervisor import HealthCheck
from nano_inference.server.guard import Guard
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, bind
from nano_inference.server.wiring import guard_policy, installed_dialects
from tests.server.tiny import close


class CountingFleet(Fleet):
    """Also lists the replica of each request that was placed."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.placed: list[int] = []

    @contextmanager
    def place(self, placement: Placement, avoid: Collection[int] = ()) -> Iterator[int | None]:
        with super().place(placement, avoid) as index:
            if index is not None:
                self.placed.append(index)
            yield index


@dataclass
class Front:
    """A running proxy."""

    url: str
    fleet: CountingFleet
    proxy: Proxy
    loop: asyncio.AbstractEventLoop
    client: httpx2.Client

    def on_loop(self, work: Any) -> Any:
        """Return `work()`, run on the proxy's event loop."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)


@contextmanager
def proxied(urls: Sequence[str], *, checks_health: bool = False, **settings: Any) -> Iterator[Front]:
    """Serve a proxy for these URLs while the block runs; `settings` are fields of `ServerConfig`."""
    config = ServerConfig(port=0, log_requests=False, workers=tuple(urls), **settings)
    listening = bind(config)
    ready: list[Front] = []
    came_up, leave = threading.Event(), threading.Event()

    async def main() -> None:
        fleet, policy = CountingFleet(len(urls)), guard_policy(config, KeyRing.of(load_keys(config)))
        async with make_client() as client:
            proxy = Proxy(fleet, client, policy, stream_errors(installed_dialects()))
            listener = Listener(uvicorn_config(Guard(proxy, policy), config, policy))
            serving = asyncio.create_task(listener.serve(sockets=[listening]))
            for index, url in enumerate(config.workers):
                fleet.set_ready(index, url)
            health = HealthCheck(fleet, client)
            if checks_health:
                health.start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            http = httpx2.Client(base_url=url, timeout=60, verify=False)
            ready.append(Front(url, fleet, proxy, asyncio.get_running_loop(), http))
            came_up.set()
            await asyncio.to_thread(leave.wait)
            await health.close()
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
