"""`Models`: which models are loaded. It loads one when a request names it, and unloads others when memory is short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.front.child import ReplicaFailed
from nano_inference.server.model import tagged

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""After a failed load, requests get its error for this long, doubled for each further failure; then it is tried again:
making room may unload models that work."""
NOTICE_S = 1.0  # a process that has ended is noticed within this time
MEASURE_S = 2.0  # between two measurements of the loaded models' memory
STOP_S = 10.0
_log = logging.getLogger("nano_inference.server")


class ModelServer(Protocol):
    """The running server of one model."""

    @property
    def pid(self) -> int:
        """Its process id."""

    async def ready(self) -> str:
        """Return its URL when the model is loaded. Raises `ReplicaFailed`."""

    async def wait(self) -> int:
        """Return its exit code when it has ended."""

    async def memory(self) -> int:
        """Return the bytes of memory that it uses."""

    async def stop(self, timeout: float) -> None:
        """Let it drain for up to `timeout` seconds, then end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model that can be loaded."""

    names: tuple[str, ...]  # names that requests may use; replies use the name in the request
    file_bytes: int  # bytes of its files: the estimate of its memory until it was loaded once
    setup: Mapping[str, Any]  # see `process.main`

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What loaded models may use together."""

    num_bytes: int
    max_loaded: int | None = None  # most models loaded at the same time; None: as many as `num_bytes` allows


@dataclass(slots=True, kw_only=True)
class HostedModel:
    """The state of one model. Accessed only on the event loop."""

    entry: ModelEntry
    num_bytes: int  # memory that it used last, or the size of its files
    state: State = "unloaded"
    url: str = ""
    num_open: int = 0  # requests that it answers
    num_waiting: int = 0  # requests that wait until it is loaded
    last_used: float = 0.0
    error: str = ""  # why it is "failed"
    failed_at: float = 0.0
    num_failures: int = 0  # failed loads since the last one that succeeded
    server: ModelServer | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Models:
    """Owns the servers of the models. All methods are called on the event loop."""

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        start: Callable[[ModelEntry], ModelServer],
        limits: MemoryLimits,
        *,
        retry_after: float = RETRY_S,
        measure_every: float = MEASURE_S,
    ) -> None:
        """`start` starts a model's server. The first entry is the default model. Times are in seconds."""
        self.hosted = [HostedModel(entry=entry, num_bytes=entry.file_bytes) for entry in entries]
        self._start, self._limits = start, limits
        self._retry_after, self._measure_every = retry_after, measure_every
        self._changed = asyncio.Event()
        self._measuring: asyncio.Task[None] | None = None

    @property
    def default(self) -> HostedModel:
        """The model of requests that name none."""
        return self.hosted[0]

    @property
    def loaded(self) -> list[HostedModel]:
        """The loaded models, the most recently used first."""
        return sorted((one for one in self.hosted if one.state == "loaded"), key=lambda one: -one.last_used)

    @property
    def num_open(self) -> int:
        """Requests that are answered, or wait for a model."""
        return sum(one.num_open + one.num_waiting for one in self.hosted)

    def find(self, name: str) -> HostedModel | None:
        """Return the model with this name; as in Ollama, a name without a tag means the tag `latest`."""
        wanted = tagged(name)
        return next((one for one in self.hosted if wanted in map(tagged, one.entry.names)), None)

    async def open(self) -> None:
        """Load the default model. Raises `ReplicaFailed`."""
        self._measuring = asyncio.create_task(self._measure_always())
        await self._load(self.default)
        if self.default.state == "failed":
            raise ReplicaFailed(self.default.error)

    async def close(self) -> None:
        """End all servers."""
        tasks = [task for one in self.hosted for task in one.tasks]
        tasks += [self._measuring] if self._measuring is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        servers = [one.server for one in self.hosted if one.server is not None]
        await asyncio.gather(*(server.stop(STOP_S) for server in servers), return_exceptions=True)

    @asynccontextmanager
    async def use(self, model: HostedModel, timeout: float) -> AsyncIterator[str]:
        """Yield the URL of the model's server, which is not ended before the block ends.

        Loads the model if necessary. Raises `ApiError` 503 if it cannot be loaded, or is not within `timeout` seconds.
        """
        model.num_waiting += 1
        try:
            async with asyncio.timeout(timeout):
                url = await self._wait_loaded(model)
            model.num_open += 1
        except TimeoutError:
            raise queue_full(f"the model {model.entry.name} is not loaded after {timeout:g} seconds") from None
        finally:
            model.num_waiting -= 1
            self._notify()
        model.last_used = time.monotonic()
        try:
            yield url
        finally:
            model.num_open -= 1
            model.last_used = time.monotonic()
            self._notify()

    async def unload(self, model: HostedModel) -> None:
        """End the model's server when its open requests are answered; the next request loads it again."""
        while model.state == "loading":
            await self._changed.wait()
        if model.state == "loaded":
            await asyncio.shield(self._start_end(model))  # a client that leaves does not stop it

    async def has_ended(self, model: HostedModel, url: str) -> bool:
        """Return whether the model's server at `url` has ended; one that was killed is noticed within a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_S):
                while model.state == "loaded" and model.url == url:
                    await self._changed.wait()
        return model.state != "loaded" or model.url != url

    # ---- loading ----------------------------------------------------------------------------------------------------

    async def _wait_loaded(self, model: HostedModel) -> str:
        has_waited = False
        while model.state != "loaded":
            pause: float = min(self._retry_after * 2 ** min(model.num_failures - 1, 30), LONGEST_RETRY_S)
            if model.state == "failed" and (has_waited or time.monotonic() < model.failed_at + pause):
                text = f"the model {model.entry.name} could not be loaded: {model.error}"
                raise ApiError(503, text, param="model", code="model_not_loaded", headers={"retry-after": "5"})
            if model.state in ("unloaded", "failed"):
                model.state = "loading"
                self._spawn(model, self._load(model))
            await self._changed.wait()
            has_waited = True
        return model.url

    async def _load(self, model: HostedModel) -> None:
        """Load a model, after unloading others if necessary; leave it loaded or failed."""
        model.state = "loading"
        try:
            await self._make_room(model)
            started = time.monotonic()
            server = model.server = self._start(model.entry)  # from here on, its memory counts
            model.url = await server.ready()
            model.num_bytes = await server.memory() or model.num_bytes
        except asyncio.CancelledError:
            self._fail(model, "the server is shutting down")
            raise
        except Exception as error:  # also of starting a process or a thread: the model must not stay "loading"
            started_server, model.server = model.server, None
            if started_server is not None:
                await started_server.stop(0)
            self._fail(model, str(error) or type(error).__name__)
        else:
            model.state, model.last_used, model.num_failures = "loaded", time.monotonic(), 0
            took, used = time.monotonic() - started, model.num_bytes / 2**20
            _log.warning("%s is loaded: %.1f s, %.0f MiB, process %d", model.entry.name, took, used, server.pid)
            self._spawn(model, self._watch(model, server))
            self._notify()

    def _fail(self, model: HostedModel, reason: str) -> None:
        _log.error("%s could not be loaded: %s", model.entry.name, reason)
        model.state, model.error, model.failed_at = "failed", reason, time.monotonic()
        model.num_failures += 1
        self._notify()

    async def _make_room(self, model: HostedModel) -> None:
        """Unload the least recently used models until there is room. Raises `ReplicaFailed` if there never will be.

        Returns without giving control to other tasks after the last check, so that the caller can take the room.
        """
        if model.entry.file_bytes > self._limits.num_bytes:
            needed, limit = model.entry.file_bytes, self._limits.num_bytes
            raise ReplicaFailed(f"its files have {needed} bytes, more than models_memory, {limit}")
        while not self._has_room(model, [one for one in self.hosted if one.server is not None]):
            staying = [one for one in self.hosted if one.server is not None and one.state != "unloading"]
            idle_first = sorted(self.loaded, key=lambda one: (one.num_open > 0, one.last_used))
            victim = next((one for one in idle_first if not one.num_waiting), None)
            if victim is not None and not self._has_room(model, staying):
                self._start_end(victim)
            else:
                await self._changed.wait()

    def _has_room(self, model: HostedModel, others: Sequence[HostedModel]) -> bool:
        """Return whether a model fits beside others."""
        if not others:
            return True
        max_loaded = self._limits.max_loaded
        if max_loaded is not None and len(others) >= max_loaded:
            return False
        return total_bytes([*others, model]) <= self._limits.num_bytes

    # ---- ending -----------------------------------------------------------------------------------------------------

    def _start_end(self, model: HostedModel) -> asyncio.Task[None]:
        """Accept no further request for a loaded model; return the task that ends it after its open ones."""
        assert model.state == "loaded" and model.server is not None
        model.state = "unloading"
        return self._spawn(model, self._end(model, model.server))

    async def _end(self, model: HostedModel, server: ModelServer) -> None:
        while model.num_open:
            await self._changed.wait()
        await server.stop(STOP_S)
        model.state, model.server = "unloaded", None
        _log.warning("%s is unloaded", model.entry.name)
        self._notify()

    async def _watch(self, model: HostedModel, server: ModelServer) -> None:
        """Note the unexpected end of a model's server."""
        code = await server.wait()
        if model.server is server and model.state == "loaded":
            _log.error("the server of %s ended with code %d; the next request loads it", model.entry.name, code)
            model.state = "unloading"
            self._notify()
            await server.stop(0)
            model.state, model.server = "unloaded", None
            self._notify()

    async def _measure_always(self) -> None:
        """Measure the loaded models; while they use too much, unload an idle one that is not the latest used."""
        while True:
            await asyncio.sleep(self._measure_every)
            for one in self.loaded:
                if one.server is not None:
                    one.num_bytes = await one.server.memory() or one.num_bytes
            idle = [one for one in self.loaded[1:] if not (one.num_open or one.num_waiting)]
            if idle and total_bytes(self.loaded) > self._limits.num_bytes:
                self._start_end(idle[-1])

    def _spawn(self, model: HostedModel, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        model.tasks.add(task)
        task.add_done_callback(model.tasks.discard)
        return task

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def total_bytes(models: Iterable[HostedModel]) -> int:
    """Return the memory of models, in bytes."""
    return sum(one.num_bytes for one in models)
