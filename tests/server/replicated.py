"""Replicas with trainers' routes behind a proxy: servers in threads, which a test can kill."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_inference.server.front.servers import Server
from tests.server.proxied import Front, proxied
from tests.server.tiny import Running
from tests.server.trainer import serving

PATIENCE = 60.0
BYTES = {"content-type": "application/octet-stream"}


class ThreadReplica:
    """A server in a thread, for `Server.start`."""

    pid = 1

    def __init__(self, directory: Path, shelf: Path, may_start: threading.Event) -> None:
        self.may_start = may_start
        self._context = serving(directory, shelf, lineage="of-all-replicas", enable_lora=True)
        self._stack = ExitStack()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.code = 0
        self.running: Running | None = None

    async def ready(self) -> str:
        await asyncio.to_thread(self.may_start.wait, PATIENCE)
        self.running = await asyncio.to_thread(self._stack.enter_context, self._context)
        return self.running.url

    async def wait(self) -> int:
        await self._ended.wait()
        return self.code

    async def memory(self) -> int:
        return 1

    async def stop(self, timeout: float) -> None:
        self._ended.set()
        await asyncio.to_thread(self._stack.close)

    def kill(self) -> None:
        """Cut all connections, accept no others, and end; called on another thread."""
        self.cut()
        self.code = -9
        self._loop.call_soon_threadsafe(self._ended.set)

    def cut(self) -> None:
        """Cut all connections and accept no others."""
        server = self.running
        assert server is not None

        def cut() -> None:
            for socket in server.listener.servers:
                socket.close()
            for connection in tuple(server.listener.server_state.connections):
                connection.transport.abort()

        server.on_loop(cut)


@dataclass
class Group:
    """A proxy and its replicas."""

    front: Front
    replicas: list[list[ThreadReplica]] = field(default_factory=list)
    """Of each place, the replicas that were started there."""
    may_start: threading.Event = field(default_factory=threading.Event)
    """Cleared, replicas that are started do not become ready."""

    def replica(self, index: int) -> Running:
        found = self.replicas[index][-1].running
        assert found is not None
        return found

    def post(self, path: str, body: Any) -> Any:
        return self.front.client.post(path, json=body)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true on the proxy's event loop."""
        deadline = time.monotonic() + PATIENCE
        while not self.front.on_loop(condition):
            assert time.monotonic() < deadline, self.front.client.get("/health").text
            time.sleep(0.002)  # polling without a pause takes half of a core from what it waits for

    def kill(self, index: int, *, then: str = "ready") -> None:
        """Kill a replica and wait until the next one at its place has a state."""
        count = len(self.replicas[index])
        self.replicas[index][-1].kill()
        server = self.front.servers.all[index]
        self.until(lambda: len(self.replicas[index]) > count and server.state == then)

    def facts(self, index: int) -> tuple[int, str, str, bool]:
        """Return a replica's version, label, checksum, and whether it is paused."""
        client = self.replica(index).client
        info, paused = client.get("/weight_info").json(), client.get("/is_paused").json()
        checksum = client.post("/weight_checker", json={"action": "checksum"}).json()["checksum"]
        assert info["update"] == "idle" and info["lineage"] == "of-all-replicas"
        return info["version"], info["weight_version"], checksum, paused["is_paused"]

    def tokens(self, index: int) -> tuple[list[int], list[dict[str, Any]]]:
        """Return what a replica generates, and the versions that it reports."""
        body = {"token_ids": [5, 9, 30, 2, 44], "sampling_params": {"max_tokens": 8, "temperature": 0}}
        (choice,) = self.replica(index).post("/inference/v1/generate", body).json()["choices"]
        return choice["token_ids"], choice["weight_versions"]


@contextmanager
def replicated(directory: Path, shelf: Path, **settings: Any) -> Iterator[Group]:
    """Serve two replicas of the tiny model while the block runs; updates are directories below `shelf`."""
    started: list[list[ThreadReplica]] = [[], []]
    may_start = threading.Event()
    may_start.set()

    def start(index: int) -> Callable[[], ThreadReplica]:
        def make() -> ThreadReplica:
            started[index].append(ThreadReplica(directory, shelf, may_start))
            return started[index][-1]

        return make

    behind = [Server(names=(f"replica {index}",), start=start(index)) for index in range(2)]
    with proxied((), replicas=behind, weights_dir=str(shelf), **settings) as front:
        try:
            yield Group(front, started, may_start)
        finally:
            may_start.set()
