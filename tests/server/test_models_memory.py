"""Which models are loaded and unloaded when: `Servers` with processes that the test controls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from nano_inference.server.errors import ApiError
from nano_inference.server.front import process
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.process import ServerFailed
from nano_inference.server.front.servers import MemoryLimits, Server, Servers

PATIENCE = 60.0


class ScriptedServer:
    """A server whose loading, memory and end the test decides."""

    def __init__(self, name: str, errors: list[str], size: int) -> None:
        self.name, self.size, self.pid = name, size, 1
        self._errors = errors
        self.may_load = asyncio.Event()
        self.ended = asyncio.Event()
        self.was_stopped = False

    async def ready(self) -> str:
        await self.may_load.wait()
        if self._errors:
            raise ServerFailed(self._errors.pop(0))
        return f"http://{self.name}"

    async def wait(self) -> int:
        await self.ended.wait()
        return 0 if self.was_stopped else -9

    async def memory(self) -> int:
        return self.size

    async def stop(self, timeout: float) -> None:
        self.was_stopped = True
        self.ended.set()


class World:
    """Models a, b, c, ... with files of 1 byte, and their servers in the order in which they were started."""

    def __init__(
        self,
        names: str,
        limits: MemoryLimits,
        *,
        loads_at_once: bool = True,
        file_bytes: int = 1,
        retry_after: float = 5.0,
        measure_every: float = 2.0,
    ) -> None:
        behind = [
            Server(names=(name,), file_bytes=1 if name == "a" else file_bytes, start=partial(self._start, name))
            for name in names
        ]
        self.sizes = dict.fromkeys(names, 10)
        self.errors: dict[str, list[str]] = {name: [] for name in names}
        self.started: list[ScriptedServer] = []
        self._loads_at_once = loads_at_once
        retry = (retry_after, retry_after)
        self.models = Servers(behind, make_client(), limits=limits, retry=retry, measure_every=measure_every)

    def _start(self, name: str) -> ScriptedServer:
        server = ScriptedServer(name, self.errors[name], self.sizes[name])
        if self._loads_at_once:
            server.may_load.set()
        self.started.append(server)
        return server

    def __getitem__(self, name: str) -> Server:
        return next(one for one in self.models.all if one.name == name)

    async def use(self, name: str) -> str:
        async with self.models.use(self[name], PATIENCE, may_start=True) as url:
            return url

    def hold(self, name: str) -> tuple[asyncio.Task[None], asyncio.Event, asyncio.Event]:
        """Use a model until the second event is set; the first is set when it is loaded."""
        began, end = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            async with self.models.use(self[name], PATIENCE, may_start=True):
                began.set()
                await end.wait()

        return asyncio.create_task(work()), began, end

    @property
    def loaded(self) -> set[str]:
        return {one.name for one in self.models.ready}


@asynccontextmanager
async def world_of(names: str, limits: MemoryLimits, **options: Any) -> AsyncIterator[World]:
    world = World(names, limits, **options)
    try:
        async with asyncio.timeout(PATIENCE):
            yield world
    finally:
        await world.models.close()
    assert all(server.was_stopped for server in world.started), "a server was left behind"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_models_are_loaded_once_when_named_and_least_recently_used_is_unloaded() -> None:
    async with world_of("abc", MemoryLimits(1 << 40, max_loaded=2)) as world:
        await world.models.open()
        assert world.loaded == {"a"}
        assert await asyncio.gather(*(world.use("b") for _ in range(5))) == ["http://b"] * 5
        assert len(world.started) == 2
        await world.use("a")
        await world.use("c")
        assert world.loaded == {"a", "c"}, "b was used less recently than a"
        await world.use("b")
        assert world.loaded == {"b", "c"} and len(world.started) == 4


async def test_measured_memory_decides_how_many_models_fit() -> None:
    async with world_of("abc", MemoryLimits(25)) as world:
        world.sizes |= {"a": 10, "b": 10, "c": 15}
        await world.models.open()
        await world.use("b")
        assert world.loaded == {"a", "b"}
        await world.use("c")  # its files have 1 byte: nothing is unloaded before it was measured
        assert world.loaded == {"a", "b", "c"}
        await world.models.unload(world["c"])
        await world.use("c")
        assert world.loaded == {"b", "c"}, "measured once, it needs 15 of 25 bytes"


async def test_memory_that_grows_unloads_an_idle_model_but_not_the_latest() -> None:
    async with world_of("ab", MemoryLimits(30), measure_every=0.01) as world:
        await world.models.open()
        await world.use("b")
        world.started[1].size = 40
        await until(lambda: world.started[0].was_stopped)
        assert world.loaded == {"b"} and not world.started[1].was_stopped


async def test_a_model_in_use_is_unloaded_only_after_its_requests() -> None:
    async with world_of("ab", MemoryLimits(1 << 40, max_loaded=1)) as world:
        await world.models.open()
        holding, began, end = world.hold("a")
        await began.wait()
        waiting = asyncio.create_task(world.use("b"))
        await until(lambda: world["a"].state == "draining")
        late = asyncio.create_task(world.use("a"))  # waits until a is loaded again, and so does not delay b
        await asyncio.sleep(0.02)
        assert not waiting.done() and not late.done() and not world.started[0].was_stopped
        end.set()
        await holding
        assert await waiting == "http://b" and await late == "http://a"
        assert [server.name for server in world.started] == ["a", "b", "a"]


async def test_a_model_that_waits_for_memory_is_not_delayed_by_new_requests_for_another() -> None:
    """b waits while a is loaded for its first request; as soon as a answers, it takes no further one."""

    async with world_of("ab", MemoryLimits(1 << 40, max_loaded=1), loads_at_once=False) as world:
        holding, began, end = world.hold("a")
        await until(lambda: len(world.started) == 1)
        waiting = asyncio.create_task(world.use("b"))
        await until(lambda: world["b"].state == "starting")
        world.started[0].may_load.set()
        await began.wait()
        await until(lambda: world["a"].state == "draining")
        end.set()
        await until(lambda: len(world.started) == 2)
        world.started[1].may_load.set()
        await asyncio.gather(holding, waiting)


async def test_a_failed_load_is_reported_to_all_who_wait_and_tried_again_later() -> None:
    async with world_of("ab", MemoryLimits(1 << 40), retry_after=1000.0) as world:
        await world.models.open()
        world.errors["b"] = ["no such file"]
        results = await asyncio.gather(*(world.use("b") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, ApiError) and one.status == 503 for one in results)
        assert all("the model b could not be loaded: no such file" in str(one) for one in results)
        with pytest.raises(ApiError, match="no such file"):
            await world.use("b")
        assert len(world.started) == 2, "not tried again at once"
    async with world_of("ab", MemoryLimits(1 << 40), retry_after=0.0) as world:
        await world.models.open()
        world.errors["b"] = ["no such file"]
        with pytest.raises(ApiError, match="no such file"):
            await world.use("b")
        assert await world.use("b") == "http://b"
        assert world.loaded == {"a", "b"}


async def test_a_process_that_cannot_be_ended_does_not_keep_its_model_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_of("ab", MemoryLimits(1 << 40)) as world:
        await world.models.open()
        world.errors["b"] = ["no such file"]
        with monkeypatch.context() as patch:

            async def stop(self: ScriptedServer, timeout: float) -> None:
                self.was_stopped = True
                raise OSError("no such process")

            patch.setattr(ScriptedServer, "stop", stop)
            with pytest.raises(ApiError, match="no such file"):
                await world.use("b")
            world.started[0].ended.set()
            await until(lambda: world["a"].state == "stopped")
        assert world["b"].state == "failed" and await world.use("a") == "http://a"


async def test_a_client_that_leaves_while_a_model_is_unloaded_does_not_stop_it() -> None:
    async with world_of("ab", MemoryLimits(1 << 40)) as world:
        await world.models.open()
        holding, began, end = world.hold("a")
        await began.wait()
        unloading = asyncio.create_task(world.models.unload(world["a"]))
        await until(lambda: world["a"].state == "draining")
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        end.set()
        await holding
        assert await world.use("a") == "http://a" and len(world.started) == 2


async def test_a_slow_request_delays_only_the_loads_that_need_its_memory() -> None:
    async with world_of("abc", MemoryLimits(25)) as world:
        world.sizes |= {"a": 10, "b": 10, "c": 10}
        await world.models.open()
        holding, began, end = world.hold("a")
        await began.wait()
        unloading = asyncio.create_task(world.models.unload(world["a"]))
        await until(lambda: world["a"].state == "draining")
        assert await world.use("b") == "http://b", "there is room beside a"
        await world.models.unload(world["b"])
        end.set()
        await asyncio.gather(holding, unloading)


async def test_a_load_that_is_cancelled_or_breaks_leaves_no_request_waiting() -> None:
    async with world_of("ab", MemoryLimits(1 << 40), loads_at_once=False) as world:
        opening = asyncio.create_task(world.models.open())
        await until(lambda: len(world.started) == 1)
        waiting = asyncio.create_task(world.use("a"))
        await until(lambda: world["a"].num_waiting == 1)
        opening.cancel()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        assert world.models.num_open == 0


async def test_a_default_model_that_cannot_be_loaded_ends_the_start() -> None:
    async with world_of("ab", MemoryLimits(1 << 40)) as world:
        world.errors["a"] = ["damaged"]
        with pytest.raises(ServerFailed, match="damaged"):
            await world.models.open()


async def test_files_larger_than_the_limit_are_refused_without_unloading_others() -> None:
    async with world_of("ab", MemoryLimits(20), file_bytes=99) as world:
        await world.models.open()
        with pytest.raises(ApiError, match="its files have 99 bytes, more than models_memory, 20"):
            await world.use("b")
        assert world.loaded == {"a"}


async def test_a_server_that_ends_by_itself_is_started_by_the_next_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with world_of("ab", MemoryLimits(1 << 40)) as world:
        await world.models.open()
        world.started[0].ended.set()
        await until(lambda: not world.loaded)
        assert await world.use("a") == "http://a"
    assert "a ended with code -9" in caplog.text


async def test_a_wait_for_a_model_ends_at_the_deadline_and_with_its_client() -> None:
    async with world_of("ab", MemoryLimits(1 << 40), loads_at_once=False) as world:
        opening = asyncio.create_task(world.models.open())
        await until(lambda: len(world.started) == 1)
        world.started[0].may_load.set()
        await opening
        with pytest.raises(ApiError, match=r"the model b is not loaded after 0.01 seconds"):
            async with world.models.use(world["b"], 0.01, may_start=True):
                pass
        leaving = asyncio.create_task(world.use("b"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert world["b"].num_waiting == 0 and world.models.num_open == 0
        world.started[1].may_load.set()
        assert await world.use("b") == "http://b", "the load was not cancelled"


async def test_a_server_that_ends_before_it_reads_its_setup_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COMMAND", ("/bin/false",))
    server = process.ServerProcess({"name": "x" * 200_000})  # more than a pipe holds
    with pytest.raises(ServerFailed, match="ended with code 1"):
        await server.ready()
    for _ in range(2):
        await server.stop(0)
