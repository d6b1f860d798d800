"""Hundreds of random worlds: the engine on a fake runner against one sample at a time, written out naively."""

from __future__ import annotations

from functools import partial

import pytest

from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams, TrainingSample
from tests.sim.fakes import (
    Failing,
    fake_config,
    fake_engine,
    fake_parts,
    reference,
    score,
)
from tests.sim.worlds import World, make_world, plain_engine

CACHES = ("paged", "radix")
with_seeds = pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(25), marks=pytest.mark.slow), pytest.param(range(25, 200), marks=pytest.mark.nightly)],
    ids=["some", "many"],
)


def run_world(world: World, *, aborts: bool = False) -> World:
    engine = world.engine
    for _ in range(20_000):
        if not world.arrivals and not engine.has_pending():
            break
        while world.arrivals and world.rng.random() < 0.5:
            world.arrive()
        if aborts and world.asked and world.rng.random() < 0.05:
            world.abort()
        world.samples += engine.step()
        engine.parts.kv.check()
    else:
        pytest.fail("the world did not end")
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    return world


def check_samples(world: World) -> None:
    assert len(world.samples) == sum(ask["n"] for ask in world.asked.values())
    drawing = world.runner.drawing
    for sample in world.samples:
        ask = world.asked[sample.request_id]
        tokens, mask, reason = reference(
            ask["prompt"],
            ask["params"],
            sample.sample_index,
            program=ask["program"],
            matcher=ask["matcher"],
            drawing=drawing,
        )
        if sample.finish_reason == "abort":
            assert sample.request_id in world.aborted
            count = len(sample.completion_tokens)
            tokens, mask = tokens[:count], mask[:count]
        else:
            assert sample.finish_reason == reason
        assert list(sample.completion_tokens) == tokens
        assert list(sample.mask) == mask
        assert len(sample.logprobs) == len(sample.token_versions) == len(tokens)
        assert all(lp == (-0.5 if drawn else 0.0) for lp, drawn in zip(sample.logprobs, mask, strict=True))
        check_scores(sample, ask)


def check_scores(sample: TrainingSample, ask: dict[str, object]) -> None:
    prompt = tuple(ask["prompt"])
    if ask["params"].prompt_logprobs is None:
        assert sample.prompt_logprobs is None
        return
    expected = tuple(score(prompt[:i], prompt[i]) for i in range(1, len(prompt)))
    if sample.finish_reason == "abort":
        expected = expected[: len(sample.prompt_logprobs)]
    assert sample.prompt_logprobs == expected


@with_seeds
@pytest.mark.parametrize("cache_type", CACHES)
def test_roomy_worlds_equal_the_reference(cache_type: str, seeds: range) -> None:
    num_computed = num_naive = 0
    for seed in seeds:
        world = run_world(make_world(seed, cache_type, tight=False))
        check_samples(world)
        num_computed += world.runner.num_computed
        num_naive += sum(len(s.prompt_tokens) + len(s.completion_tokens) for s in world.samples)
    assert num_computed < 0.75 * num_naive, "prefixes were not shared"


@with_seeds
@pytest.mark.parametrize("cache_type", CACHES)
def test_tight_worlds_preempt_and_equal_the_reference(cache_type: str, seeds: range) -> None:
    num_preempted = 0
    for seed in seeds:
        world = run_world(make_world(seed, cache_type, tight=True))
        check_samples(world)
        num_preempted += sum(sample.num_preemptions for sample in world.samples)
    assert num_preempted > 8


@with_seeds
@pytest.mark.parametrize("cache_type", CACHES)
def test_abort_returns_partial_samples_and_leaves_others_unaffected(cache_type: str, seeds: range) -> None:
    num_aborted = 0
    for seed in seeds:
        world = run_world(make_world(seed, cache_type, tight=seed % 2 == 0), aborts=True)
        check_samples(world)
        num_aborted += len(world.aborted)
    assert num_aborted > 8


@with_seeds
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("guesses", [False, True])
def test_several_tokens_a_step_equal_one(cache_type: str, guesses: bool, seeds: range) -> None:
    for seed in seeds:
        lookahead = 2 + seed % 15
        world = make_world(seed, cache_type, tight=seed % 2 == 0, lookahead=lookahead, guesses=guesses)
        check_samples(run_world(world, aborts=seed % 3 == 0))


@with_seeds
@pytest.mark.parametrize("cache_type", CACHES)
def test_windows_that_run_while_the_host_commits_change_no_output(cache_type: str, seeds: range) -> None:
    num_ahead = num_preempted = num_aborted = 0
    for seed in seeds:
        overlapping = partial(plain_engine, overlaps=True)
        world = make_world(seed, cache_type, tight=seed % 3 < 2, lookahead=1 + seed % 7, make_engine=overlapping)
        check_samples(run_world(world, aborts=seed % 2 == 0))
        num_ahead += world.engine.overlaps.get("ahead", 0)
        num_preempted += sum(sample.num_preemptions for sample in world.samples)
        num_aborted += len(world.aborted)
    assert num_ahead > 100 and min(num_preempted, num_aborted) > 3, (num_ahead, num_preempted, num_aborted)


@with_seeds
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("tight", [False, True])
def test_drafts_change_no_output(cache_type: str, tight: bool, seeds: range) -> None:
    num_right = num_wrong = num_preempted = num_aborted = 0
    for seed in seeds:
        world = run_world(make_world(seed, cache_type, tight=tight, guesses=True), aborts=seed % 3 == 0)
        check_samples(world)
        runner = world.runner
        num_right += runner.num_right
        num_wrong += runner.num_wrong
        num_preempted += sum(sample.num_preemptions for sample in world.samples)
        num_aborted += len(world.aborted)
    assert min(num_right, num_wrong) > 60 and num_aborted > 3, (num_right, num_wrong, num_aborted)
    assert num_preempted > 8 or not tight


@pytest.mark.parametrize("cache_type", CACHES)
def test_a_group_prefills_its_prompt_once(cache_type: str) -> None:
    engine = fake_engine(cache_type)
    engine.generate([list(range(20, 40))], SamplingParams(max_tokens=1, seed=1), 8)
    computed = engine.parts.runner.num_computed
    tail = 4 if cache_type == "paged" else 1  # the radix cache copies the part of a block that agrees
    assert computed == 20 + 7 * tail


@pytest.mark.parametrize("cache_type", CACHES)
def test_equal_blocks_behind_different_prefixes_do_not_wait_for_each_other(cache_type: str) -> None:
    engine = fake_engine(cache_type)
    prefixes = [[1, 2, 3, 4, *[last] * 4] for last in (20, 30)]
    engine.generate(prefixes, SamplingParams(max_tokens=1, seed=1))
    for prefix in prefixes:
        engine.add_request([*prefix, *range(40, 46)], SamplingParams(max_tokens=1, seed=1))
    assert engine.tick().stats.num_rows == 2


def test_last_tokens_of_equal_prompts_do_not_wait_for_each_other() -> None:
    engine = fake_engine()
    for _ in range(2):
        engine.add_request([5], SamplingParams(max_tokens=1, seed=1))
    assert engine.tick().stats.num_rows == 2


def test_finished_prompt_is_reused_to_the_token() -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts("radix", 200, 16))
    first = engine.generate([list(range(10, 33))], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))[0]
    turn = [*first.prompt_tokens, *first.completion_tokens, 1, 2]
    second = engine.generate([turn], SamplingParams(max_tokens=1, seed=1))[0]
    assert second.num_cached_tokens == len(turn) - 3  # the last drawn token's K/V never existed


@pytest.mark.parametrize("length", [7, 8, 9])
def test_every_sample_of_a_group_is_reused_by_its_next_turn(length: int) -> None:
    engine = fake_engine()
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    samples = engine.generate([list(range(20, 20 + length))], params, 4)
    for sample in [*samples, *engine.generate([[*samples[0].prompt_tokens]], params)]:
        turn = [*sample.prompt_tokens, *sample.completion_tokens, 1, 2]
        again = engine.generate([turn], SamplingParams(max_tokens=1, seed=1))[0]
        assert again.num_cached_tokens >= len(turn) - 3
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks


def test_equal_samples_share_blocks() -> None:
    engine = fake_engine()
    engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    engine.step()
    engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    for _ in range(30):
        engine.step()
        engine.parts.kv.check()
    assert engine.parts.kv.num_blocks - engine.parts.kv.num_free_blocks() <= 10


def test_a_failing_matcher_or_program_ends_its_own_sample_only() -> None:
    engine = fake_engine()
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
    good = engine.add_request([1, 2, 3], params)
    broken = engine.add_request([4, 5, 6], params, make_matcher=Failing)
    forcing = engine.add_request([7, 8, 9], params, program=Failing())
    samples = {}
    while engine.has_pending():
        samples |= {sample.request_id: sample for sample in engine.step()}
        engine.parts.kv.check()
    assert list(samples[good].completion_tokens) == reference([1, 2, 3], params, 0)[0]
    assert samples[broken].finish_reason == "abort" and "the matcher broke" in str(samples[broken].stop_reason)
    assert samples[forcing].finish_reason == "abort" and "vocabulary" in str(samples[forcing].stop_reason)
