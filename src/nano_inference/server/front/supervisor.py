"""`Supervisor`: starts the replicas, replaces those that end, restarts all one by one. `HealthCheck` asks them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import httpx2

from nano_inference.server.front.child import ReplicaFailed
from nano_inference.server.front.fleet import Fleet

POLL_S = 1.0  # between two health checks of a replica
HEALTH_TIMEOUT_S = 10.0  # a busy machine answers late; a stopped process refuses the connection at once
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a replica that failed is started again; doubled each time
_STOP_S = 10.0
_log = logging.getLogger("nano_inference.server")


class Replica(Protocol):
    """A running server."""

    pid: int  # its process id on its machine, once it is ready

    async def ready(self) -> str:
        """Return its URL when it accepts requests. Raises `ReplicaFailed`."""

    async def wait(self) -> int:
        """Return its exit code when it has ended."""

    async def stop(self, timeout: float) -> None:
        """Let it drain for up to `timeout` seconds, then end it."""


Start = Callable[[], Replica]


Watch = Callable[[], Coroutine[Any, Any, None]]


async def forever() -> None:
    """Never return."""
    await asyncio.Event().wait()


class Supervisor:
    """Owns the replicas. All methods are called on the event loop."""

    def __init__(self, fleet: Fleet, start: Start, *, drain_timeout: float, watch: Watch = forever) -> None:
        """`watch` raises an exception when replicas can no longer be started."""
        self._watch = watch
        self._fleet, self._start, self._drain_timeout = fleet, start, drain_timeout
        self._replicas: dict[int, Replica] = {}
        self._expected: set[int] = set()  # replicas whose end is not a failure: they are being restarted
        self._tasks: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all replicas; return when they accept requests. Raises `ReplicaFailed` if one does not start."""
        indices = range(len(self._fleet.members))
        self._replicas = {index: self._start() for index in indices}
        await asyncio.gather(*(self._announce(index) for index in indices))
        self._tasks = [asyncio.create_task(one) for one in (*map(self._keep, indices), self._watch())]

    async def run(self) -> None:
        """Replace replicas that end. Raises what a task raises, `ClusterLost` for example; else never returns."""
        await asyncio.gather(*self._tasks)

    def restart_all(self) -> None:
        """Start a rolling restart, unless one is in progress."""
        if len(self._fleet.members) < 2:
            _log.warning("a rolling restart needs at least two replicas")
        elif self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart_all())

    async def close(self, timeout: float = _STOP_S) -> None:
        """End all replicas."""
        tasks = [*self._tasks, *([self._restarting] if self._restarting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.stop(timeout) for one in self._replicas.values()), return_exceptions=True)

    async def _announce(self, index: int) -> None:
        url = await self._replicas[index].ready()
        _log.warning("replica %d accepts requests at %s, process %d", index, url, self._replicas[index].pid)
        self._fleet.set_ready(index, url)

    async def _keep(self, index: int) -> None:
        """Replace a replica each time it ends."""
        pause = FIRST_PAUSE_S
        while True:
            code = await self._replicas[index].wait()
            self._fleet.set_away(index, "starting")
            if index not in self._expected:
                _log.warning("replica %d ended with code %d and is started again", index, code)
            await self._replicas[index].stop(0)
            self._replicas[index] = self._start()
            try:
                await self._announce(index)
                pause = FIRST_PAUSE_S
            except ReplicaFailed as error:
                _log.error("replica %d does not start: %s", index, error)
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def _restart_all(self) -> None:
        """Restart each replica when it has no open requests, while another one accepts new ones."""
        _log.warning("rolling restart: started")
        for index in range(len(self._fleet.members)):
            await self._fleet.wait_other(index)
            self._expected.add(index)
            self._fleet.set_away(index, "draining")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_timeout):
                    await self._fleet.wait_idle(index)
            await self._replicas[index].stop(_STOP_S)
            await self._fleet.wait_ready(index)
            self._expected.discard(index)
        _log.warning("rolling restart: finished")


class HealthCheck:
    """Owns a task for each replica that sends GET /health; takes it out of the routing while that fails."""

    def __init__(self, fleet: Fleet, client: httpx2.AsyncClient) -> None:
        self._fleet, self._client = fleet, client
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks."""
        self._tasks = [asyncio.create_task(self._watch(index)) for index in range(len(self._fleet.members))]

    async def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, index: int) -> None:
        member = self._fleet.members[index]
        while True:
            if member.state in ("ready", "unreachable"):
                url = member.url
                try:
                    reply = await self._client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)
                    # A draining server of this project answers 200, too.
                    is_healthy = reply.status_code == 200 and b'"draining"' not in reply.content[:4096]
                except httpx2.HTTPError:
                    is_healthy = False
                is_current = member.url == url and member.state in ("ready", "unreachable")
                if is_current and is_healthy and member.state == "unreachable":
                    self._fleet.set_ready(index, url)
                elif is_current and not is_healthy and member.state == "ready":
                    _log.warning("replica %d at %s does not accept requests", index, url)
                    self._fleet.set_away(index, "unreachable")
            await asyncio.sleep(POLL_S)
