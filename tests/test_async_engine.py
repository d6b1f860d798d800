"""`AsyncEngine`: many callers on one event loop, each with what it would get alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference import (
    AsyncEngine,
    BadRequest,
    EngineDead,
    InferenceEngine,
    SamplingParams,
    WeightError,
    save_weights,
    weights_checksum,
)
from nano_inference.core.scheduler import STREAM_LOOKAHEAD
from nano_inference.types import Delta, EngineRequest, UpdateBusy, UpdateCancelled, WeightLabel
from nano_inference.weights.adapters import StagedAdapter
from nano_inference.weights.updates import AdapterLoad, WeightUpdate
from tests.sim.fakes import Adapting, Calculator, OnStep, fake_config, fake_parts, raising
from tests.sim.versioned import content
from tests.weights.pairs import OpenEngine, Pair
from tests.weights.test_update import PausedSource

PROMPT = [5, 9, 30, 2, 44]
PARAMS = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
NORM = "model.norm.weight"
LONG = SamplingParams(max_tokens=100_000 - 100, seed=4, ignore_eos=True)

Work = Callable[[AsyncEngine[InferenceEngine]], Awaitable[None]]


def fake_engine(num_blocks: int = 100, on_step: OnStep = lambda number: None) -> InferenceEngine:
    engine = InferenceEngine(fake_config(), parts=fake_parts("radix", num_blocks, 4))
    engine.parts.runner.on_step = on_step
    return engine


def run(work: Work, engine: InferenceEngine | None = None) -> None:
    async def main() -> None:
        async with AsyncEngine(lambda: engine or fake_engine()) as running:
            await work(running)

    asyncio.run(main())


def test_concurrent_generates_equal_separate_ones() -> None:
    prompts = [[1, 2, 3, n] for n in range(20)]
    expected = [content(fake_engine().generate([prompt, PROMPT], PARAMS, 2)) for prompt in prompts]

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        found = await asyncio.gather(*(engine.generate([prompt, PROMPT], PARAMS, 2) for prompt in prompts))
        assert [content(samples) for samples in found] == expected

    run(work)


def test_a_cancelled_watch_is_forgotten() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        found = await engine.watch(lambda _: None)
        assert engine.num_watches == 1
        found.cancel()
        await asyncio.sleep(0)  # its callback
        await engine.call(lambda _: None)
        assert engine.num_watches == 0

    run(work)


def test_stream_yields_every_token_and_then_the_sample() -> None:
    (expected,) = fake_engine().generate([PROMPT], PARAMS, program=Calculator())

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        deltas = [delta async for delta in engine.stream(PROMPT, PARAMS, program=Calculator())]
        assert tuple(token for delta in deltas for token in delta.token_ids) == expected.completion_tokens
        assert [delta.sample is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]

    run(work)


def test_a_stream_gets_few_tokens_at_a_time() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        sizes = [len(delta.token_ids) async for delta in engine.stream(PROMPT, replace(PARAMS, max_tokens=40))]
        assert sum(sizes) == 40 and max(sizes) == STREAM_LOOKAHEAD

    run(work, InferenceEngine(fake_config(), parts=fake_parts("radix", 100, 4, lookahead=16)))


@pytest.mark.parametrize("how", ["cancel a generate", "break a stream", "cancel a stream"])
def test_cancelled_caller_aborts_its_requests(how: str) -> None:
    inner = slow_engine()

    async def leave(engine: AsyncEngine[InferenceEngine]) -> None:
        if how == "cancel a generate":
            task = asyncio.create_task(engine.generate([PROMPT], LONG, 2))
            async for _ in engine.stream(PROMPT, PARAMS):  # the task's requests run by now
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        if how == "break a stream":
            await stream.aclose()  # type: ignore[attr-defined]
            return
        waiting = asyncio.ensure_future(anext(stream))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        await leave(engine)
        await engine.call(lambda _: None)  # after the commands before it
        state = await engine.call(lambda inner: (inner.has_pending(), inner.parts.kv.num_free_blocks()))
        assert state == (False, 30_000)
        assert content(await engine.generate([PROMPT], PARAMS)) == content(fake_engine().generate([PROMPT], PARAMS))

    run(work, inner)


def test_invalid_request_raises_and_others_are_unaffected() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        good = asyncio.create_task(engine.generate([PROMPT], PARAMS))
        for prompts, count in (([PROMPT, [10_000]], 1), ([[]], 1), ([PROMPT], 0), ([PROMPT], True)):
            with pytest.raises(BadRequest):
                await engine.generate(prompts, PARAMS, count)
        assert await engine.generate([], PARAMS) == []
        assert content(await good) == content(fake_engine().generate([PROMPT], PARAMS))

    run(work)


def test_call_that_runs_steps_delivers_all_deltas() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        task = asyncio.create_task(engine.generate([PROMPT], PARAMS))
        await asyncio.sleep(0)
        await engine.call(lambda inner: inner.generate([[7, 8]], replace(PARAMS, max_tokens=40)))
        assert content(await task) == content(fake_engine().generate([PROMPT], PARAMS))

    run(work)


def test_failed_step_raises_engine_dead_in_every_waiter() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        found: list[Any] = await asyncio.gather(
            *(engine.generate([PROMPT], PARAMS) for _ in range(3)), return_exceptions=True
        )
        for error in found:
            assert isinstance(error, EngineDead) and "the model broke" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
        with pytest.raises(EngineDead, match="the model broke"):
            await engine.generate([PROMPT], PARAMS)

    run(work, fake_engine(on_step=raising(RuntimeError("the model broke"), 1)))


def test_stop_fails_waiting_callers() -> None:
    async def main() -> None:
        engine = AsyncEngine(lambda: fake_engine(num_blocks=30_000))
        await engine.start()
        task = asyncio.create_task(engine.generate([PROMPT], LONG))
        await asyncio.sleep(0)
        await engine.stop()
        assert not engine.is_alive
        with pytest.raises(EngineDead, match="stopped"):
            await task
        with pytest.raises(EngineDead, match="stopped"):
            await engine.generate([PROMPT], PARAMS)

    asyncio.run(main())


def test_start_raises_what_opening_raised() -> None:
    def open_engine() -> InferenceEngine:
        raise ValueError("no such model")

    async def main() -> None:
        engine = AsyncEngine(open_engine)
        with pytest.raises(ValueError, match="no such model"):
            await engine.start()
        await engine.stop()
        await AsyncEngine(open_engine).stop()  # never started

    asyncio.run(main())


def test_runner_that_fails_between_steps_ends_the_engine() -> None:
    inner = fake_engine()

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        inner.parts.runner.failure = RuntimeError("a rank was lost")
        while engine.failure is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="a rank was lost"):
            await engine.generate([PROMPT], PARAMS)

    run(work, inner)


def test_update_takes_what_the_engine_takes(untied: Pair, open_engine: OpenEngine, tmp_path: Path) -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        assert await engine.update_weights(untied.new.named_parameters(), version="a") == 1
        assert (
            await engine.update_weights(untied.named(), on_running="abort", checksum=weights_checksum(untied.named()))
            == 2
        )
        assert await engine.update_weights({NORM: untied.named()[NORM]}, partial=True, timeout=60) == 3
        assert await engine.update_weights(save_weights(untied.named(), tmp_path / "new"), version="b") == 4
        assert await engine.call(lambda inner: inner.weight_info()) == (4, "b", "idle")
        gathered: list[int] = []
        update = WeightUpdate(weights=untied.named(), on_gathered=lambda: gathered.append(1))
        assert (await engine.update_weights(update), gathered) == (5, [1])
        for wrong in (untied.new, tmp_path / "none", [1]):
            with pytest.raises(WeightError):
                await engine.update_weights(wrong)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="on_running"):
            await engine.update_weights(untied.named(), on_running="later")  # type: ignore[arg-type]

    run(work, open_engine(untied))


@pytest.mark.parametrize("num_turns", range(8))
def test_cancelled_update_is_not_installed(num_turns: int, untied: Pair, open_engine: OpenEngine) -> None:
    source = PausedSource(untied.named())

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        update = asyncio.create_task(engine.update_weights(source))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (await engine.call(lambda inner: inner.weight_info())).update == "idle"
        source.resume.set()

    run(work, open_engine(untied))


def test_update_from_a_silent_source_ends_at_its_timeout(untied: Pair, open_engine: OpenEngine) -> None:
    source = PausedSource(untied.named())

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        with pytest.raises(WeightError, match="were not complete within"):
            await engine.update_weights(WeightUpdate(weights=source, timeout=0.1))
        source.resume.set()

    run(work, open_engine(untied))


def test_drained_requests_of_a_paused_engine_end_with_what_they_have() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        await engine.pause()
        waiting = asyncio.create_task(engine.generate([PROMPT], LONG, 2))
        await asyncio.sleep(0)
        engine.drain()
        assert [sample.finish_reason for sample in await waiting] == ["abort"] * 2

    run(work, fake_engine(num_blocks=30_000))


def slow_engine() -> InferenceEngine:
    """Takes a while for a step, so that the event loop keeps up with the deltas."""
    return fake_engine(30_000, lambda number: time.sleep(0.001))


async def started(engine: AsyncEngine[InferenceEngine], num_tokens: int) -> AsyncIterator[Delta]:
    """Return a stream of a request that has a token."""
    stream = engine.stream(PROMPT, replace(LONG, max_tokens=num_tokens))
    await anext(stream)
    return stream


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume_are_the_engines(mode: Any) -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        stream = await started(engine, 90_000 if mode == "abort" else 200)
        assert await engine.pause(mode)
        assert await engine.call(lambda inner: (inner.is_paused, inner.is_pausing)) == (True, False)
        late = asyncio.create_task(engine.generate([[9, 9]], PARAMS))
        await engine.call(lambda _: None)
        rest = [delta async for delta in stream] if mode != "keep" else []
        assert not late.done()
        await engine.resume()
        assert content(await late) == content(fake_engine().generate([[9, 9]], PARAMS))
        rest = rest or [delta async for delta in stream]
        assert rest[-1].finish_reason == ("abort" if mode == "abort" else "length")

    run(work, slow_engine())


def test_abort_ends_the_callers_named_or_all() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        request = EngineRequest(prompt=PROMPT, params=LONG, num_samples=2)
        with engine.submit([request]) as first, engine.submit([request]) as second:
            assert await engine.abort([first]) == 2
            while not first.is_done:
                await first.take()
            assert not second.is_done and await engine.abort() == 2

    run(work, slow_engine())


@pytest.mark.parametrize("how", ["resume", "pause", "resume by call"])
def test_a_pause_that_waits_is_overtaken(how: str) -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        stream = await started(engine, 90_000)
        waiting = asyncio.create_task(engine.pause("wait"))
        while not await engine.call(lambda inner: inner.is_pausing):
            await asyncio.sleep(0)
        if how == "resume":
            await engine.resume()
        elif how == "pause":
            assert await engine.pause()
        else:
            await engine.call(lambda inner: inner.resume())
        assert await waiting is False
        await stream.aclose()  # type: ignore[attr-defined]

    run(work, slow_engine())


def test_a_cancelled_pause_is_cancelled_unless_another_call_waits() -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        stream = await started(engine, 90_000)
        first, second = (asyncio.create_task(engine.pause("wait")) for _ in range(2))
        while not await engine.call(lambda inner: inner.is_pausing):
            await asyncio.sleep(0)
        for task, is_pausing in ((first, True), (second, False)):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await engine.call(lambda inner: inner.is_pausing) is is_pausing
        await stream.aclose()  # type: ignore[attr-defined]

    run(work, slow_engine())


def test_callers_of_a_cancelled_or_failed_update_get_their_own_error(untied: Pair, open_engine: OpenEngine) -> None:
    source = PausedSource(untied.named())

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        update = asyncio.create_task(engine.update_weights(source))
        while not await engine.cancel_update():
            await asyncio.sleep(0)
        with pytest.raises(UpdateCancelled):
            await update
        source.resume.set()
        failing = await engine.start_update(WeightUpdate(weights={"no such weight": untied.named()[NORM]}))
        while True:
            try:
                assert await engine.update_weights(untied.named()) == 1
            except UpdateBusy:  # the first is gathered, or has failed and its caller is notified
                continue
            break
        with pytest.raises(WeightError, match="no such weight"):
            await failing

    run(work, open_engine(untied))


def test_all_who_wait_for_an_update_get_its_error(untied: Pair, open_engine: OpenEngine) -> None:
    resume = threading.Event()

    def source() -> Iterator[tuple[str, Any]]:
        yield NORM, untied.named()[NORM]
        resume.wait(30)
        yield "no such weight", untied.named()[NORM]

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        held = await engine.start_update(WeightUpdate(weights=source(), hold=True))
        commits = [asyncio.create_task(engine.commit_update()) for _ in range(2)]
        await asyncio.sleep(0)  # their commands are in the inbox, before the next
        await engine.call(lambda _: None)
        resume.set()
        for one in (held, commits[0]):
            with pytest.raises(WeightError, match="no such weight"):
                await one
        with pytest.raises((WeightError, BadRequest)):  # refused, if it came after the first
            await commits[1]
        assert (await engine.call(lambda inner: inner.weight_info())).version == 0

    run(work, open_engine(untied))


def test_a_held_update_that_is_committed_early_blocks_no_step(untied: Pair, open_engine: OpenEngine) -> None:
    source = PausedSource(untied.named())

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
        await anext(stream)
        held = await engine.start_update(WeightUpdate(weights=source, hold=True, on_running="wait"))
        commit = asyncio.create_task(engine.commit_update())
        await asyncio.sleep(0)  # its command is in the inbox, before the next
        await engine.call(lambda _: None)
        source.resume.set()
        assert (await held).version == 0
        rest = [delta async for delta in stream]
        assert await commit == 1 and {version for delta in rest for version in delta.versions} == {0}

    run(work, open_engine(untied))


def test_an_engine_whose_start_is_cancelled_or_whose_step_fails_is_shut_down() -> None:
    opened, inner = threading.Event(), fake_engine()

    def open_slowly() -> InferenceEngine:
        opened.wait(30)
        return inner

    async def cancel() -> None:
        engine = AsyncEngine(open_slowly)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        opened.set()
        while engine.is_alive:
            await asyncio.sleep(0.01)

    asyncio.run(cancel())
    with pytest.raises(EngineDead):
        inner.generate([PROMPT], PARAMS)
    failing = fake_engine()
    failing.tick = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]

    async def fail() -> None:
        async with AsyncEngine(lambda: failing) as engine:
            with pytest.raises(EngineDead, match="division"):
                await engine.generate([PROMPT], PARAMS)

    asyncio.run(fail())
    with pytest.raises(EngineDead, match="shut down"):
        failing.generate([PROMPT], PARAMS)


def test_adapters_are_staged_beside_steps() -> None:
    ready, may_stage = threading.Event(), threading.Event()

    class Slow(Adapting):
        def stage_adapter(self, load: AdapterLoad) -> StagedAdapter:
            ready.set()
            assert may_stage.wait(30)
            return super().stage_adapter(load)

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        may_stage.set()
        assert await engine.load_adapter("a", "directory") == 1
        may_stage.clear()
        loading = asyncio.create_task(engine.load_adapter("a", "directory", version="new"))
        await asyncio.to_thread(ready.wait)
        (sample,) = await engine.generate([PROMPT], PARAMS, adapter="a")
        assert sample.adapter_versions == (1,) * 8
        may_stage.set()
        assert await loading == "new"
        deltas = [delta async for delta in engine.stream(PROMPT, PARAMS, adapter="a")]
        assert [one for delta in deltas for one in delta.adapter_versions] == ["new"] * 8
        with pytest.raises(BadRequest, match="adapter: is bad"):
            await engine.load_adapter("a", "bad")
        assert [one.version for one in await engine.adapters()] == ["new"]
        assert await engine.score(PROMPT, adapter="a") != await engine.score(PROMPT)
        assert await engine.unload_adapter("a")
        with pytest.raises(BadRequest, match="'a' is not loaded"):
            await engine.generate([PROMPT], PARAMS, adapter="a")

    run(work, Slow(fake_config(), parts=fake_parts("radix", 100, 4)))


def test_adapters_are_loaded_and_unloaded_in_the_order_of_the_calls() -> None:
    may_stage = threading.Event()
    installed: list[object] = []

    class Slow(Adapting):
        def stage_adapter(self, load: AdapterLoad) -> StagedAdapter:
            assert load.version != "first" or may_stage.wait(30)
            return super().stage_adapter(load)

        def install_adapter(self, staged: StagedAdapter) -> WeightLabel:
            installed.append(staged.load.version)
            return super().install_adapter(staged)

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        loads = [asyncio.create_task(engine.load_adapter("a", "x", version=one)) for one in ("first", "second")]
        unloading = asyncio.create_task(engine.unload_adapter("a"))
        await engine.generate([PROMPT], PARAMS)  # without an order, the second one is installed meanwhile
        may_stage.set()
        assert await asyncio.gather(*loads, unloading) == ["first", "second", True]
        assert installed == ["first", "second"] and not await engine.adapters()

    run(work, Slow(fake_config(), parts=fake_parts("radix", 100, 4)))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": ""}, "name"),
        ({"version": 1.5}, "version"),
        ({"on_running": "wait"}, "on_running"),
        ({"config": {}}, "config"),
        ({"source": {}}, "config"),
    ],
)
def test_load_adapter_rejects_invalid_arguments(given: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        fake_engine().load_adapter(**{"name": "a", "source": "directory", **given})
    assert caught.value.field == field
    with pytest.raises(BadRequest, match="adapter: this engine has no model that could use it"):
        fake_engine().load_adapter("a", "directory")
