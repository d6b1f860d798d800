"""`Servers`: which servers behind one port run and accept requests, and which of them a request may use.

Replicas are kept running: one that ends is started again. Of several models, each is started when a request names it,
and the least recently used ones are stopped when memory is short. Of servers at given URLs only the health is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import httpx2
from starlette.responses import Response
from starlette.types import Scope

from nano_inference.rl.pool.routing import PrefixRouter
from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.front.placement import Placement
from nano_inference.server.front.process import ServerFailed

Answer = Callable[[Scope], Awaitable[Response]]
State = Literal["stopped", "starting", "ready", "unreachable", "draining", "failed", "needs an update"]
NEEDS_UPDATE: State = "needs an update"  # it runs, without the weights in force: see `Trainers.prepare`
CHECK_S = 1.0  # between two health checks of a server
HEALTH_TIMEOUT_S = 10.0  # a busy machine answers late; a stopped process refuses the connection at once
NOTICE_S = 1.0  # a process that has ended is noticed within this time
MEASURE_S = 2.0  # between two measurements of the memory of models
STOP_S = 10.0
LOAD_PATH = "/models/load"
LARGE_BODY = 64 << 10  # bodies of more bytes are parsed in a thread
_LATER = MappingProxyType({"retry-after": "5"})
_log = logging.getLogger("nano_inference.server")


class Process(Protocol):
    """A running server."""

    @property
    def pid(self) -> int:
        """Its process id on its machine, once it is ready."""

    async def ready(self) -> str:
        """Return its URL when it accepts requests. Raises `ServerFailed`."""

    async def wait(self) -> int:
        """Return its exit code when it has ended, negative for a signal."""

    async def memory(self) -> int:
        """Return its resident bytes and those of its descendants."""

    async def stop(self, timeout: float) -> None:
        """Let it drain for up to `timeout` seconds, then end it. Can be called twice."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One replica, model, or server at a URL. Accessed only on the event loop."""

    names: tuple[str, ...]  # for messages; of a model, the names that requests may use
    start: Callable[[], Process] | None = None  # None: it runs already
    url: str = ""
    state: State = "stopped"
    file_bytes: int = 0  # bytes of a model's files: the estimate of its memory until it was loaded once
    num_bytes: int = 0  # memory that it used last
    num_open: int = 0  # requests that it answers
    num_waiting: int = 0  # requests that wait until it is ready
    last_used: float = 0.0
    process: Process | None = None
    error: str = ""  # why it is "failed", or "needs an update"
    retry_at: float = 0.0  # when it may be started again after a failure
    num_failures: int = 0  # failed starts since the last one that succeeded

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which servers may answer a request."""

    servers: Callable[[], Sequence[Server]]  # now; the first one is asked, unless `placement` chooses
    placement: Placement | None = None
    attempts: int = 1  # requests to one server, while it does not answer
    may_start: bool = False  # whether the request may start a server
    passed_over: int = 0  # status of replies that are returned only by the last server
    lost: ApiError  # the error if no server answers


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What loaded models may use together."""

    num_bytes: int
    max_loaded: int | None = None  # most models loaded at the same time; None: as many as `num_bytes` allows


KEPT_RETRY_S, ON_DEMAND_RETRY_S = (0.5, 30.0), (5.0, 300.0)
"""First and longest pause before a server that could not start is started again; it doubles with each failure.
Until then, requests for a model get the error: making room for it may stop models that work."""


class Servers:
    """Owns the processes. All methods are called on the event loop."""

    def __init__(
        self,
        servers: Sequence[Server],
        client: httpx2.AsyncClient,
        *,
        limits: MemoryLimits | None = None,
        retry: tuple[float, float] | None = None,
        drain_timeout: float = STOP_S,
        measure_every: float = MEASURE_S,
    ) -> None:
        """`limits` of servers that are started on demand, the first one at once; None: all are kept running.

        `drain_timeout`: seconds that a rolling restart gives to open requests.
        """
        self.all = servers
        self._client, self._limits = client, limits
        self._retry = retry or (KEPT_RETRY_S if limits is None else ON_DEMAND_RETRY_S)
        self._drain_timeout, self._measure_every = drain_timeout, measure_every
        self._router = PrefixRouter(len(servers))
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarting: asyncio.Task[None] | None = None
        self.prepare: Callable[[Server], Awaitable[str]] = _nothing_to_do
        """Called with each server before it gets requests; returns why it "needs an update", or nothing."""
        self.may_restart: Callable[[], bool] = lambda: True
        """Returns whether a rolling restart may stop a server at the moment; a change must be notified."""
        self.bar_to_restart: Callable[[], str] = str
        """Returns why a new process could not replace a running one, or nothing."""

    @property
    def ready(self) -> list[Server]:
        """Servers that accept requests, the most recently used first."""
        return sorted((one for one in self.all if one.state == "ready"), key=lambda one: -one.last_used)

    @property
    def running(self) -> list[Server]:
        """Servers that answer, also those that accept no requests at the moment."""
        return [one for one in self.all if one.state in ("ready", "unreachable", "draining", NEEDS_UPDATE)]

    @property
    def urls(self) -> dict[int, str]:
        """Index -> URL of the servers that accept requests."""
        return {index: one.url for index, one in enumerate(self.all) if one.state == "ready"}

    @property
    def num_open(self) -> int:
        """Requests that are answered, or wait for a server."""
        return sum(one.num_open + one.num_waiting for one in self.all)

    async def open(self) -> None:
        """Start the servers; return when they are ready. Raises `ServerFailed` if one cannot start."""
        first = [one for one in self.all if one.start is not None]
        if self._limits is None:
            tasks = [self._spawn(self._keep(one)) for one in first]
            for one in self.all:
                self._spawn(self._check(one))
        else:
            self._spawn(self._measure_always())
            first = first[:1]
            tasks = [self._spawn(self._run(one)) for one in first]
        try:
            while any(one.state != "ready" for one in first):
                for one in first:
                    if one.state == "failed":
                        raise ServerFailed(one.error)
                await self._changed.wait()
        except BaseException:  # cancelled, for example: no request waits any longer
            for task in tasks:
                task.cancel()
            raise

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        running = [one.process for one in self.all if one.process is not None]
        await asyncio.gather(*(one.stop(STOP_S) for one in running), return_exceptions=True)

    # ---- one request ------------------------------------------------------------------------------------------------

    def place(self, placement: Placement, among: Sequence[Server]) -> Server:
        """Choose a server for a request, by its prefix and their work; `use` must follow."""
        allowed = set(among)
        avoid = [index for index, one in enumerate(self.all) if one not in allowed]
        return self.all[self._router.place(placement.tokens, placement.cost, placement.session, avoid=avoid)]

    @asynccontextmanager
    async def use(
        self, server: Server, timeout: float = 0.0, *, may_start: bool = False, cost: int = 0
    ) -> AsyncIterator[str]:
        """Yield the URL of a server, which is not stopped before the block ends. `cost`: that of its placement.

        Starts a model if it `may_start`, else raises `ApiError` 403; 503 if that fails or takes `timeout` seconds.
        """
        try:
            if server.state != "ready":
                await self._until_ready(server, timeout, may_start=may_start)
            server.num_open += 1
            server.last_used = time.monotonic()
            try:
                yield server.url
            finally:
                server.num_open -= 1
                server.last_used = time.monotonic()
        finally:
            self._router.finish(self.all.index(server), cost)
            self.notify()

    async def lost(self, server: Server, url: str, reason: str) -> None:
        """Note that a server at `url` did not answer; return when no request is sent there, or after `NOTICE_S`."""
        if self._limits is None and server.url == url and server.state == "ready":
            _log.warning("%s at %s: %s", server.name, url, reason)
            self.mark(server, "unreachable")  # until its next health check
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_S):
                await self.until(lambda: server.state != "ready" or server.url != url)

    async def _until_ready(self, server: Server, timeout: float, *, may_start: bool) -> None:
        has_waited = False
        server.num_waiting += 1
        try:
            async with asyncio.timeout(timeout):
                while server.state != "ready":
                    is_late = has_waited or (may_start and time.monotonic() < server.retry_at)
                    if server.state == "failed" and is_late:
                        text = f"the model {server.name} could not be loaded: {server.error}"
                        raise ApiError(503, text, param="model", code="model_not_loaded", headers=_LATER)
                    if server.state != "starting" and not may_start:
                        text = f"{server.name} is not loaded: POST its name as `model` to {LOAD_PATH}; without a key,"
                        raise ApiError(403, f"{text} GET loads no model", param="model", code="load_needs_post")
                    if server.state in ("stopped", "failed"):
                        server.state = "starting"
                        self._spawn(self._run(server))
                    await self._changed.wait()
                    has_waited = True
        except TimeoutError:
            raise queue_full(f"the model {server.name} is not loaded after {timeout:g} seconds") from None
        finally:
            server.num_waiting -= 1
            self.notify()

    # ---- the life of a process --------------------------------------------------------------------------------------

    async def _keep(self, server: Server) -> None:
        """Run a server, again each time that it has ended."""
        while True:
            await self._run(server)
            await asyncio.sleep(server.retry_at - time.monotonic())

    async def _run(self, server: Server) -> None:
        """Start a server and return when its process has ended; one that cannot start is "failed" then."""
        assert server.start is not None
        self.mark(server, "starting")
        try:
            await self._make_room(server)
            began = time.monotonic()
            process = server.process = server.start()  # from here on, its memory counts
            server.url = await process.ready()
            server.num_bytes = await process.memory() or server.num_bytes
            server.error = await self.prepare(server)
        except asyncio.CancelledError:
            self._fail(server, "the server is shutting down")
            raise
        except Exception as error:  # also of starting a process or a thread: it must not stay "starting"
            started, server.process = server.process, None
            if started is not None:
                await _ended(started)
            self._fail(server, str(error) or type(error).__name__)
            _log.error("%s could not be started: %s", server.name, server.error)
            return
        server.last_used, server.num_failures, server.retry_at = time.monotonic(), 0, 0.0
        where = f"{server.name} accepts requests at {server.url}, process {process.pid}"
        _log.warning("%s, after %.1f s, %.0f MiB", where, time.monotonic() - began, server.num_bytes / 2**20)
        if server.error:
            _log.error("%s needs an update: %s", server.name, server.error)
        self.mark(server, NEEDS_UPDATE if server.error else "ready")
        code = await process.wait()
        if server.state != "draining":
            _log.warning("%s ended with code %d", server.name, code)
        self.mark(server, "draining")
        await _ended(process)
        server.process = None
        self.mark(server, "stopped")

    def _fail(self, server: Server, reason: str) -> None:
        pause = min(self._retry[0] * 2 ** min(server.num_failures, 30), self._retry[1])
        server.error, server.retry_at = reason, time.monotonic() + pause
        server.num_failures += 1
        self.mark(server, "failed")

    def stop(self, server: Server, timeout: float | None = None) -> asyncio.Task[None]:
        """Send no further request to a running server; end it when it has answered the open ones, or after `timeout`.

        Returns the task, which ends with the process; a caller that is cancelled should not cancel it.
        """
        self.mark(server, "draining")
        return self._spawn(self._drain(server, timeout))

    async def _drain(self, server: Server, timeout: float | None) -> None:
        process = server.process
        if process is None:  # it has ended by itself
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.until(lambda: not server.num_open)
        await process.stop(STOP_S)
        await self.until(lambda: server.process is not process)

    def end(self, server: Server) -> None:
        """End a server at once; one that is kept running starts again."""
        if server.process is not None:
            self.mark(server, "draining")
            self._spawn(_ended(server.process))

    async def unload(self, server: Server) -> None:
        """Stop a server when its open requests are answered; the next request starts it again."""
        await self.until(lambda: server.state != "starting")
        if server.state == "ready":
            await asyncio.shield(self.stop(server))

    def restart_all(self) -> None:
        """Start a rolling restart, unless one is in progress."""
        if len(self.all) < 2:
            _log.warning("a rolling restart needs at least two replicas")
        elif self._restarting is None or self._restarting.done():
            self._restarting = self._spawn(self._restart_all())

    async def _restart_all(self) -> None:
        _log.warning("rolling restart: started")
        for server in self.all:
            if failure := await self._restart(server):
                _log.error("rolling restart: %s", failure)
                return
        _log.warning("rolling restart: finished")

    async def _restart(self, server: Server) -> str:
        """Restart a server when it has no open requests, while another accepts new ones; return why not, or nothing."""
        may_stop = ("ready", "unreachable", NEEDS_UPDATE)
        await self.until(lambda: self.may_restart() and server.state in may_stop and bool(set(self.ready) - {server}))
        if bar := self.bar_to_restart():
            return f"refused, because {bar}"
        await self.stop(server, self._drain_timeout)
        await self.until(lambda: server.state in ("ready", NEEDS_UPDATE))
        return "" if server.state == "ready" else f"ended early: {server.name} {server.state}"

    async def _check(self, server: Server) -> None:
        """Take a server out of the routing while its GET /health fails."""
        while True:
            if server.state in ("ready", "unreachable"):
                url = server.url
                try:
                    reply = await self._client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)
                    # A draining server of this project answers 200, too.
                    is_healthy = reply.status_code == 200 and b'"draining"' not in reply.content[:4096]
                except httpx2.HTTPError:
                    is_healthy = False
                if server.url == url and server.state == ("unreachable" if is_healthy else "ready"):
                    _log.warning("%s at %s %s requests", server.name, url, "accepts" if is_healthy else "refuses")
                    self.mark(server, "ready" if is_healthy else "unreachable")
            await asyncio.sleep(CHECK_S)

    # ---- memory of models -------------------------------------------------------------------------------------------

    async def _make_room(self, server: Server) -> None:
        """Stop the least recently used models until there is room. Raises `ServerFailed` if there never will be.

        Returns without giving control to other tasks after the last check, so that the caller can take the room.
        """
        if self._limits is None:
            return
        if server.file_bytes > self._limits.num_bytes:
            needed, limit = server.file_bytes, self._limits.num_bytes
            raise ServerFailed(f"its files have {needed} bytes, more than models_memory, {limit}")
        while not self._fits(server, [one for one in self.all if one.process is not None]):
            staying = [one for one in self.all if one.process is not None and one.state != "draining"]
            idle_first = sorted(self.ready, key=lambda one: (one.num_open > 0, one.last_used))
            victim = next((one for one in idle_first if not one.num_waiting), None)
            if victim is not None and not self._fits(server, staying):
                self.stop(victim)
            else:
                await self._changed.wait()

    def _fits(self, server: Server, others: Sequence[Server]) -> bool:
        assert self._limits is not None
        if not others:
            return True
        if self._limits.max_loaded is not None and len(others) >= self._limits.max_loaded:
            return False
        return sum(one.num_bytes or one.file_bytes for one in (server, *others)) <= self._limits.num_bytes

    async def _measure_always(self) -> None:
        """Measure the loaded models; while they use too much, stop an idle one that is not the latest used."""
        assert self._limits is not None
        while True:
            await asyncio.sleep(self._measure_every)
            for one in self.ready:
                if one.process is not None:
                    one.num_bytes = await one.process.memory() or one.num_bytes
            idle = [one for one in self.ready[1:] if not (one.num_open or one.num_waiting)]
            if idle and sum(one.num_bytes for one in self.ready) > self._limits.num_bytes:
                self.stop(idle[-1])

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def mark(self, server: Server, state: State) -> None:
        server.state = state
        self.notify()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _nothing_to_do(server: Server) -> str:
    return ""


async def _ended(process: Process) -> None:
    """End a process at once. What fails in that is logged: a server's state must not depend on it."""
    try:
        await process.stop(0)
    except Exception as error:
        _log.error("process %s could not be ended: %s: %s", process.pid, type(error).__name__, error)
