"""Held updates: gathered weights wait beside the current ones until `commit_update` or `cancel_update`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from nano_inference import AsyncEngine, BadRequest, InferenceEngine, SamplingParams, WeightError, weights_checksum
from nano_inference.types import OnRunning, TrainingSample
from nano_inference.weights.updates import WeightUpdate
from tests.weights.pairs import OpenEngine, Pair

PROMPT = [5, 9, 30, 2, 44, 17, 80, 3]
PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)


def tokens(engine: InferenceEngine) -> tuple[int, ...]:
    return engine.generate([PROMPT], PARAMS)[0].completion_tokens


@pytest.mark.parametrize("blocking", [True, False])
def test_held_update_leaves_old_weights_until_commit(blocking: bool, untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    old, old_sum = tokens(engine), engine.weights_checksum()
    assert engine.update_weights(untied.named(), blocking=blocking, version="step-1", hold=True) == 1
    assert engine.finish_update() == 0
    assert engine.weight_info() == (0, None, "staged")
    assert tokens(engine) == old and engine.weights_checksum() == old_sum
    with pytest.raises(ValueError, match="blocking must be true or false"):
        engine.commit_update(blocking=1)  # type: ignore[arg-type]
    assert engine.commit_update() == 1
    assert engine.weight_info() == (1, "step-1", "idle")
    assert engine.weights_checksum() == weights_checksum(untied.named().items())
    assert tokens(engine) != old


def test_a_commit_gives_the_weights_a_version_above_the_installed_one(untied: Pair, open_engine: OpenEngine) -> None:
    """An engine that joins others later can count as they do."""
    engine = open_engine(untied)
    for version, installed in ((7, 7), (None, 8), (9, 9)):
        engine.update_weights(untied.named(), blocking=True, version=f"step-{installed}", hold=True)
        with pytest.raises(BadRequest, match=f"version must be >= {engine.get_weight_version() + 1}"):
            engine.commit_update(version=engine.get_weight_version())
        assert engine.commit_update(blocking=False, version=version) == installed
        assert engine.finish_update() == installed == engine.get_weight_version()
        sample = engine.generate([PROMPT], PARAMS)[0]
        assert set(sample.token_versions) == {installed}
        assert sample.version_labels == {installed: f"step-{installed}"}


@pytest.mark.parametrize("blocking", [True, False])
def test_held_update_that_fails_is_reported_and_not_committed(
    blocking: bool, untied: Pair, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    broken = dict(list(untied.named().items())[1:])
    with pytest.raises(WeightError, match="lacks 1 tensors"):
        engine.update_weights(broken, blocking=blocking, hold=True)
        engine.finish_update()
    with pytest.raises(BadRequest, match="no weight update"):
        engine.commit_update()
    engine.update_weights(broken, hold=True)
    with pytest.raises(WeightError, match="lacks 1 tensors"):
        engine.commit_update()
    assert engine.weight_info() == (0, None, "idle")


def started(engine: InferenceEngine) -> int:
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=20, seed=4, ignore_eos=True), claim=True)
    for _ in range(5):
        engine.step()
    return request


def finished(engine: InferenceEngine, request: int) -> TrainingSample:
    engine.wait_for_any((request,))
    return engine.collect(request)[0]


@pytest.mark.parametrize("how", ["keep", "recompute", "abort", "wait"])
def test_on_running_applies_at_the_commit(how: OnRunning, untied: Pair, open_engine: OpenEngine) -> None:
    held, plain = open_engine(untied), open_engine(untied)
    requests = [started(held), started(plain)]
    held.update_weights(untied.named(), blocking=True, hold=True, on_running=how)
    if how == "wait":  # a held update does not keep new requests from starting
        assert held.generate([PROMPT[:3]], PARAMS)[0].weight_version == 0
        requests[0] = started(held)
    assert held.commit_update() == 1
    plain.update_weights(untied.named(), blocking=True, on_running=how)
    mine, expected = finished(held, requests[0]), finished(plain, requests[1])
    assert mine.completion_tokens == expected.completion_tokens and mine.logprobs == expected.logprobs
    assert mine.token_versions == expected.token_versions and mine.finish_reason == expected.finish_reason


def test_an_update_that_waits_lets_no_other_request_start(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    running = started(engine)
    engine.update_weights(untied.named(), on_running="wait")
    assert engine.parts.weights is not None and engine.parts.weights.wait() == "staged"
    queued = engine.add_request(PROMPT[:3], PARAMS, claim=True)
    assert set(finished(engine, queued).token_versions) == {1}
    assert set(finished(engine, running).token_versions) == {0}


def test_a_prompt_that_an_update_restarts_is_scored_once(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied, max_tokens_per_batch=4)
    params = replace(PARAMS, prompt_logprobs=2)
    request = engine.add_request(PROMPT, params, claim=True)
    engine.tick()
    engine.update_weights(untied.named(), blocking=True)
    engine.tick()
    mine = finished(engine, request)
    engine.flush_cache()
    (expected,) = engine.generate([PROMPT], params)
    assert mine.prompt_logprobs == expected.prompt_logprobs and mine.prompt_ranks == expected.prompt_ranks
    assert mine.prompt_top_logprobs == expected.prompt_top_logprobs is not None


def test_the_step_that_installs_an_update_reports_what_it_aborted(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied, max_batch_size=1)
    running, queued = (engine.add_request(PROMPT, PARAMS, claim=True) for _ in range(2))
    engine.tick()
    engine.update_weights(untied.named(), blocking=True, hold=True, on_running="abort")
    engine.commit_update(blocking=False)
    result = engine.tick()
    assert [delta.request_id for delta in result.deltas] == [running, queued]
    assert [(sample.request_id, sample.finish_reason) for sample in result.samples] == [(running, "abort")]


Work = Callable[[AsyncEngine[InferenceEngine]], Awaitable[None]]


def run(work: Work, engine: InferenceEngine) -> None:
    async def main() -> None:
        async with AsyncEngine(lambda: engine) as running:
            await work(running)

    asyncio.run(main())


def test_async_engine_holds_commits_and_cancels(untied: Pair, open_engine: OpenEngine) -> None:
    old = tokens(open_engine(untied))

    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        assert await engine.update_weights(WeightUpdate(weights=untied.named(), hold=True)) == 0
        assert (await engine.generate([PROMPT], PARAMS))[0].completion_tokens == old
        assert await engine.cancel_update() and not await engine.cancel_update()
        assert await engine.update_weights(WeightUpdate(weights=untied.named(), hold=True, label="a")) == 0
        assert await engine.commit_update(version=5) == 5
        sample = (await engine.generate([PROMPT], PARAMS))[0]
        assert sample.completion_tokens != old and sample.version_labels == {5: "a"}
        assert await engine.update_weights(WeightUpdate(weights=untied.named())) == 6
        with pytest.raises(WeightError, match="the update lacks"):
            await engine.update_weights(WeightUpdate(weights={}, hold=True))
        with pytest.raises(BadRequest, match="no weight update"):
            await engine.commit_update()

    run(work, open_engine(untied))


def test_async_update_commits_while_requests_run(untied: Pair, open_engine: OpenEngine) -> None:
    async def work(engine: AsyncEngine[InferenceEngine]) -> None:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=400, seed=4, ignore_eos=True))
        first = await anext(stream)
        await engine.update_weights(WeightUpdate(weights=untied.named(), hold=True))
        assert first.versions == (0,) and await engine.commit_update() == 1
        versions = [version for delta in [delta async for delta in stream] for version in delta.versions]
        assert versions[-1] == 1 and versions == sorted(versions)

    run(work, open_engine(untied))
