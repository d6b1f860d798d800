"""`EngineLink`: deltas, failures, shutdown, and aborts reach the right outboxs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference import BadRequest, InferenceEngine, SamplingParams
from nano_inference.core.outbox import Outbox, PromptDelta
from nano_inference.server.engine_link import MAX_UNREAD, EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.metrics import Metrics
from nano_inference.types import Delta, EngineRequest, TrainingSample
from tests.sim.fakes import Failing, FakeRunner, fake_config, fake_parts, reference

LONG = SamplingParams(max_tokens=30, seed=4, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=50_000, seed=4, ignore_eos=True)


def request(prompt: tuple[int, ...] = (5, 9, 30), params: SamplingParams = LONG, **options: Any) -> EngineRequest:
    return EngineRequest(prompt=prompt, params=params, **options)


def fake_engine(num_blocks: int = 60) -> InferenceEngine:
    return InferenceEngine(fake_config(), parts=fake_parts("radix", num_blocks, 4))


def opened(engine: Any) -> LoadedModel:
    metrics = Metrics(model_name="fake", num_blocks=60, block_size=4, cache_config={})
    return LoadedModel(engine=engine, metrics=metrics, model=None)  # type: ignore[arg-type]


@asynccontextmanager
async def linked(engine: Any | None = None, *, step_timeout: float = 60) -> AsyncIterator[EngineLink]:
    link = EngineLink(step_timeout=step_timeout)
    await link.start(lambda: opened(engine or fake_engine()))
    link.start_accepting()
    try:
        yield link
    finally:
        await link.stop(1.0)


async def to_end(outbox: Outbox) -> list[PromptDelta]:
    deltas: list[PromptDelta] = []
    while not outbox.is_done:
        deltas += await outbox.take(30)
    return deltas


def tokens_of(deltas: list[PromptDelta], prompt: int = 0, sample: int = 0) -> list[int]:
    found = [p.delta for p in deltas if (p.prompt_index, p.delta.sample_index) == (prompt, sample)]
    return [token for delta in found for token in delta.token_ids]


async def test_outbox_returns_every_sample_of_every_prompt() -> None:
    async with linked() as link:
        with link.submit([request(num_samples=2), request((1, 2))]) as outbox:
            deltas = await to_end(outbox)
        for prompt, number, sample in (((5, 9, 30), 0, 0), ((5, 9, 30), 0, 1), ((1, 2), 1, 0)):
            assert tokens_of(deltas, number, sample) == reference(prompt, LONG, sample)[0]
        assert sum(one.delta.sample is not None for one in deltas) == 3
        assert all(times.started is not None for samples in outbox.times for times in samples)


@pytest.mark.parametrize("failure", [RuntimeError("the model broke"), SystemExit("the model broke")])
async def test_engine_failure_reaches_every_outbox(failure: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine()
    runner = engine.parts.runner
    assert isinstance(runner, FakeRunner)
    calls = iter(range(100))

    def broken(rows: Any, copies: Any, fresh: Any) -> Any:
        if next(calls) == 5:
            raise failure
        return FakeRunner.run(runner, rows, copies, fresh)

    runner.run = broken  # type: ignore[method-assign]

    with caplog.at_level(logging.ERROR):
        async with linked(engine) as link:

            async def wait() -> ApiError:
                with link.submit([request()]) as outbox, pytest.raises(ApiError) as refused:
                    await to_end(outbox)
                return refused.value

            errors = await asyncio.gather(*(wait() for _ in range(4)))
            assert [error.status for error in errors] == [500] * 4
            assert link.state == "dead"
            with pytest.raises(ApiError) as late, link.submit([request()]):
                pass
            assert (late.value.status, late.value.code) == (503, "engine_dead")
    assert "the model broke" in caplog.text


class Stuck:
    """An engine that runs `free_steps` steps; the next one blocks until `resume` is set."""

    def __init__(self, free_steps: int = 0, num_blocks: int = 60) -> None:
        self.resume = threading.Event()
        self.is_stuck = threading.Event()
        self.inner = fake_engine(num_blocks)
        self.failure: BaseException | None = None
        self._free_steps = free_steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def tick(self) -> Any:
        if self.inner.has_pending():
            self._free_steps -= 1
            if self._free_steps < 0:
                self.is_stuck.set()
                self.resume.wait(60)
        return self.inner.tick()


async def test_stuck_step_fails_outboxs(capfd: pytest.CaptureFixture[str]) -> None:
    engine = Stuck()
    with contextlib.redirect_stderr(io.StringIO()):  # has no file descriptor, which the stacks need
        async with linked(engine, step_timeout=0.2) as link:
            try:
                async with asyncio.timeout(30):
                    with link.submit([request()]) as outbox, pytest.raises(ApiError) as raised:
                        await to_end(outbox)
            finally:
                engine.resume.set()
            assert (raised.value.status, link.state) == (500, "dead")
    assert "tests/server/test_engine_link.py" in capfd.readouterr().err, "the stacks are not dumped"


async def test_process_frozen_in_a_step_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = [0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + hours[0] * 3600)
    monkeypatch.setattr("nano_inference.async_engine.time", clock)
    sleep, waits = asyncio.sleep, []

    async def short_sleep(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds / 100)

    monkeypatch.setattr(asyncio, "sleep", short_sleep)
    engine = Stuck()

    async with linked(engine, step_timeout=60) as link:
        with link.submit([request()]) as outbox:
            assert await asyncio.to_thread(engine.is_stuck.wait, 60)
            hours[0] = 1
            waits.clear()
            async with asyncio.timeout(60):
                while len(waits) < 4:  # several checks of the watchdog
                    await sleep(0.01)
            assert link.state == "ready"
            engine.resume.set()
            assert tokens_of(await to_end(outbox)) == reference((5, 9, 30), LONG, 0)[0]


def broken_factory() -> Any:
    raise RuntimeError("no such grammar")


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (request(prompt=(10**6,)), BadRequest),
        (request(make_matcher=broken_factory), RuntimeError),
        (request(make_matcher=Failing), None),
        (request(program=Failing()), None),
    ],
)
async def test_failed_request_does_not_affect_others(bad: EngineRequest, kind: type[Exception] | None) -> None:
    async with linked() as link:
        with link.submit([request()]) as good, link.submit([request((1, 2)), bad]) as harmed:
            if kind is None:
                deltas = await to_end(harmed)
                reasons = [one.delta.finish_reason for one in deltas if one.prompt_index == 1]
                assert reasons[-1] == "abort"
            else:
                with pytest.raises(kind):
                    await to_end(harmed)
            assert tokens_of(await to_end(good)) == reference((5, 9, 30), LONG, 0)[0]
        await link.engine.call(lambda _: None)
        assert link.state == "ready"


async def test_drain_refuses_new_requests_and_finishes_open_ones() -> None:
    async with linked() as link:
        with link.submit([request()]) as outbox:
            link.drain()
            with pytest.raises(ApiError) as refused, link.submit([request()]):
                pass
            assert (refused.value.status, refused.value.code) == (503, "shutting_down")
            assert tokens_of(await to_end(outbox)) == reference((5, 9, 30), LONG, 0)[0]
        with_open = link.num_open
        assert with_open == 0


async def test_tokens_after_the_client_left_are_not_counted() -> None:
    engine = Stuck(free_steps=3, num_blocks=30_000)

    async with linked(engine) as link:
        metrics: Any = link.metrics
        with link.submit([request(params=SHORT)]) as outbox:
            await outbox.take(30)
            assert await asyncio.to_thread(engine.is_stuck.wait, 60)
        before = metrics.render()
        engine.resume.set()
        await link.engine.call(lambda _: None)  # after the step that ran when the client left
        await asyncio.sleep(0)
        counted = [line for line in metrics.render().splitlines() if b"generation_tokens" in line or b"success" in line]
        assert counted == [line for line in before.splitlines() if b"generation_tokens" in line or b"success" in line]


async def test_unread_limit_fails_outbox() -> None:
    engine = Stuck()

    async with linked(engine) as link:
        with link.submit([request()]) as outbox:
            for _ in range(MAX_UNREAD + 1):
                link.on_delta(outbox, 0, delta(), outbox.put(0, delta(), time.monotonic()))
            with pytest.raises(ApiError, match="too slowly"):
                await outbox.take(1)
        engine.resume.set()


@pytest.mark.parametrize("name", ["mine", "cmpl-mine", "chatcmpl-mine"])
async def test_end_requests_by_id(name: str) -> None:
    engine = Stuck(free_steps=3, num_blocks=30_000)

    async with linked(engine) as link:
        with (
            link.submit([request(params=ENDLESS), request((1, 2), ENDLESS, num_samples=2)], [name]) as mine,
            link.submit([request(params=SHORT)], ["yours"]) as yours,
        ):
            await mine.take(30)
            ending = asyncio.create_task(link.end_requests(["mine"]))
            await asyncio.sleep(0)  # now the thread has it in its queue and runs at most one more step
            engine.resume.set()
            assert await ending == 3
            samples = [one.delta.sample for one in await to_end(mine) if one.delta.sample is not None]
            assert [sample.finish_reason for sample in samples] == ["abort"] * 3
            assert tokens_of(await to_end(yours)) == reference((5, 9, 30), SHORT, 0)[0]
        assert await link.end_requests(["mine", "yours"]) == 0


async def test_end_requests_includes_just_submitted_and_excludes_later_ones() -> None:
    engine = fake_engine()
    resume = threading.Event()

    async with linked(engine) as link:
        holding = asyncio.create_task(link.engine.call(lambda _: resume.wait(60)))
        await asyncio.sleep(0)  # later commands are queued behind it and run before the next step
        with link.submit([request()]) as early:
            ending = asyncio.create_task(link.end_requests(first=lambda engine: engine.pause()))
            await asyncio.sleep(0)
            with link.submit([request(params=SHORT)]) as late:
                resume.set()
                assert await holding and await ending == 1
                assert [one.delta.finish_reason for one in await to_end(early)] == ["abort"]
                assert await late.take(0.01) == []
                await link.engine.call(lambda engine: engine.resume())
                assert tokens_of(await to_end(late)) == reference((5, 9, 30), SHORT, 0)[0]


@pytest.mark.parametrize("end", ["death", "stop"])
async def test_stop_answers_pending_calls(end: str) -> None:
    engine = Stuck()

    async with linked(engine) as link:
        found = await link.engine.watch(lambda _: None)
        with link.submit([request()]):
            await asyncio.to_thread(engine.is_stuck.wait, 60)
            late = asyncio.create_task(link.engine.call(lambda _: None))
            await asyncio.sleep(0)
            if end == "death":
                engine.failure = RuntimeError("a rank was lost")  # the watchdog looks at it
            else:
                await link.stop(0.05)
            for one in (found, late):
                with pytest.raises(ApiError) as raised:
                    await one
                assert raised.value.status == (500 if end == "death" else 503)
        engine.resume.set()


def delta(sample: TrainingSample | None = None) -> Delta:
    return Delta(
        request_id=0, sample_index=0, token_ids=(1,), logprobs=(-0.5,), mask=(1,), versions=(0,), sample=sample
    )
