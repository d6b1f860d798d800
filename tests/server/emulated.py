"""Emulated replicas behind the real `Servers` and `Trainers`, on one event loop: a test orders every step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx2
from starlette.types import Message, Receive, Scope

from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.front.process import ServerFailed
from nano_inference.server.front.servers import Server, Servers, State
from nano_inference.server.front.trainers import Trainers
from nano_inference.server.security import KeyRing

DISK, BODY = "/update_weights_from_disk", "/update_weights_from_body"
COMMIT, ABORT = "/commit_weight_update", "/abort_weight_update"
TURNS = 200  # of the event loop, in which whatever can proceed has done so


class Replica:
    """One process: it gathers, holds and installs updates, and can be paused, asleep or dead."""

    pid = 1

    def __init__(self, group: Emulated, index: int) -> None:
        self.url = f"http://r{index}n{len(group.started[index])}"
        self.version, self.is_held, self.is_paused, self.is_asleep, self.weights = 0, False, False, False, "present"
        self.ended, self.aborts = asyncio.Event(), asyncio.Event()
        self.paths: list[str] = []
        self.keys: set[str] = set()
        self._group, self._index = group, index

    async def ready(self) -> str:
        opening = [asyncio.ensure_future(one.wait()) for one in (self._group.may_start, self.ended)]
        await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.is_set():
            raise ServerFailed("killed while it started")
        return self.url

    async def wait(self) -> int:
        await self.ended.wait()
        return -9

    async def memory(self) -> int:
        return 1

    async def stop(self, timeout: float) -> None:
        self.ended.set()

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        path, body = request.url.path, await request.aread()
        self.paths.append(path)
        self.keys.add(request.headers.get("authorization", ""))
        if self._index in self._group.refusing.get(path, {}):
            status, code = self._group.refusing[path][self._index]
            error = {"message": "emulated", "param": None, "code": code, "type": "t"}
            return httpx2.Response(status, json={"error": error}, headers={"x-should-retry": "false"})
        is_update = path in (DISK, BODY, "/update_weights")
        if is_update:
            self.aborts.clear()
        if (gate := self._group.gates.get((self._index, path))) is not None:
            waits = [asyncio.ensure_future(one.wait()) for one in (gate, self.ended, *((self.aborts,) * is_update))]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.is_set():
            raise httpx2.ReadError("it died")
        if is_update and self.aborts.is_set():
            return httpx2.Response(409, json={"error": {"message": "the update was aborted", "code": "aborted"}})
        if path == COMMIT and not self.is_held:
            return httpx2.Response(400, json={"error": {"message": "no weights are held", "code": "no_update"}})
        fields: dict[str, Any] = {
            "query": {name: text for name, (text,) in parse_qs(request.url.query.decode()).items()}
        }
        if path == COMMIT:
            self.version, self.weights = json.loads(body)["version"], "present"
        if path == ABORT:
            fields = {"aborted": self.is_held or not self.aborts.is_set(), "closed_groups": []}
            self.aborts.set()
        self.is_held = is_update or (self.is_held and path not in (COMMIT, ABORT))
        self.is_paused = path == "/pause" or (self.is_paused and path != "/resume")
        self.is_asleep = path == "/sleep" or (self.is_asleep and path != "/wake_up")
        facts = {"weights": self.weights, "weight_version": str(self.version), "version": self.version}
        return httpx2.Response(200, json={**fields, **facts})


class Emulated:
    """The servers, their trainers' routes, and what the replicas do."""

    def __init__(self, shelf: Path, **settings: Any) -> None:
        self.started: list[list[Replica]] = [[], []]
        """Of each place, the replicas that were started there."""
        self.gates: dict[tuple[int, str], asyncio.Event] = {}
        """(place, path) -> what such a request waits for before it has an effect."""
        self.refusing: dict[str, dict[int, tuple[int, str]]] = {}
        """path -> place -> status and code of the error that it returns."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.is_healthy = True
        self.gone = asyncio.Event()  # set: the clients of all requests have left
        config = ServerConfig(replicas=2, enable_rl=True, weights_dir=str(shelf), **settings)
        self.client = httpx2.AsyncClient(transport=httpx2.MockTransport(self._answer))
        behind = [Server(names=(f"replica {index}",), start=self._starter(index)) for index in (0, 1)]
        self.servers = Servers(behind, self.client, retry=(0.001, 0.001))
        self.trainers = Trainers(self.servers, self.client, config, guard_policy(config, KeyRing.of(())))

    def _starter(self, index: int) -> Callable[[], Replica]:
        def start() -> Replica:
            self.started[index].append(Replica(self, index))
            return self.started[index][-1]

        return start

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        for one in (one for place in self.started for one in place):
            if one.url == f"http://{request.url.host}" and not one.ended.is_set():
                if request.url.path == "/health":
                    return httpx2.Response(200 if self.is_healthy else 503, json={})
                return await one.answer(request)
        raise httpx2.ConnectError("refused")

    @property
    def running(self) -> list[Replica]:
        """The latest replica of each place."""
        return [place[-1] for place in self.started]

    @property
    def states(self) -> list[State]:
        return [one.state for one in self.servers.all]

    def gate(self, index: int, path: str) -> asyncio.Event:
        """Let requests for a path at a place wait for the event that is returned."""
        self.gates[index, path] = asyncio.Event()
        return self.gates[index, path]

    def request(self, path: str, body: Any = None, *, query: str = "") -> tuple[Scope, Receive]:
        messages: list[Message] = [{"type": "http.request", "body": json.dumps(body or {}).encode()}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        scope: Scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode()}
        return {**scope, "headers": [], "state": {}}, receive

    async def post(self, path: str, body: Any = None, *, query: str = "") -> tuple[int, dict[str, Any]]:
        """Return status and reply. An error has the form of all routes. Raises `ClientGone`."""
        try:
            reply = await self.trainers.answer(*self.request(path, body, query=query))
        except ApiError as error:
            return error.status, error.to_dict()
        return reply.status_code, json.loads(bytes(reply.body))

    def posting(self, path: str, body: Any = None, *, query: str = "") -> asyncio.Task[tuple[int, dict[str, Any]]]:
        return asyncio.ensure_future(self.post(path, body, query=query))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    async def settle(self) -> None:
        """Let whatever waits for nothing proceed."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def kill(self, index: int, *, then: State = "ready") -> None:
        """Kill a replica and wait until the next one at its place has a state."""
        count = len(self.started[index])
        self.running[index].ended.set()
        await self.until(lambda: len(self.started[index]) > count and self.states[index] == then)


@asynccontextmanager
async def emulated(shelf: Path, **settings: Any) -> AsyncIterator[Emulated]:
    """Two replicas."""
    group = Emulated(shelf, **settings)
    await group.servers.open()
    try:
        async with asyncio.timeout(120):  # a command that waits for ever fails the test
            yield group
    finally:
        await group.servers.close()
        await group.client.aclose()
