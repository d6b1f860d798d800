"""Random worlds with updates, pauses, sleeps, aborts and preemptions at random moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest

from nano_inference.types import OnRunning, TrainingSample, WeightError
from tests.sim.fakes import model_of, replay, score
from tests.sim.versioned import new_weights, versioned_engine
from tests.sim.worlds import World, make_world

CACHES = ("paged", "radix")


def update(world: World) -> None:
    """Install new weights in one of the ways there are; what may still be read changes with it."""
    engine, rng = world.engine, world.rng
    how = rng.choice(get_args(OnRunning))
    if how == "wait" and engine.is_asleep:
        return
    label = rng.choice([None, f"step-{engine.get_weight_version() + 1}"])
    expected = engine.get_weight_version() + 1
    if rng.random() < 0.5:
        assert engine.update_weights(new_weights(), blocking=True, on_running=how, version=label) == expected
    else:
        assert engine.update_weights(new_weights().items(), on_running=how, version=label) == expected
        if how == "wait" and rng.random() < 0.5 and not engine.is_paused:
            engine.parts.weights.wait()
            for _ in range(rng.randrange(4)):
                world.samples += engine.step()
        assert engine.finish_update() == expected
    if how != "keep":
        world.runner.oldest = expected
    world.counts[how] += 1


def refuse(world: World) -> None:
    """An update that cannot be used changes nothing."""
    version = world.engine.get_weight_version()
    broken = new_weights()
    broken["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(WeightError):
        world.engine.update_weights(broken, blocking=True)
    assert world.engine.get_weight_version() == version
    world.counts["refused"] += 1


def interfere(world: World) -> None:
    """Do one random thing that a trainer or a client may do."""
    engine, rng = world.engine, world.rng
    action = rng.choice(["update", "update", "refuse", "pause", "resume", "resume", "sleep", "wake", "abort", "flush"])
    if action == "update":
        update(world)
    elif action == "refuse":
        refuse(world)
    elif action == "pause" and not engine.is_asleep:
        clear = rng.random() < 0.5
        engine.pause(rng.choice(["keep", "keep", "wait", "abort"]), clear_cache=clear)
        if clear:
            world.runner.oldest = engine.get_weight_version()
        world.counts["pause"] += 1
    elif action == "resume":
        engine.resume()
    elif action == "sleep":
        engine.sleep()
        world.runner.oldest = engine.get_weight_version()
        world.counts["sleep"] += 1
    elif action == "wake":
        engine.wake()
    elif action == "flush":
        engine.flush_cache()
    elif action == "abort" and world.asked:
        world.abort()


def run_world(world: World, interfere: Callable[[World], object] = interfere) -> World:
    engine = world.engine
    for _ in range(20_000):
        if not world.arrivals and not engine.has_pending() and not (engine.is_paused or engine.is_asleep):
            break
        while world.arrivals and world.rng.random() < 0.5:
            world.arrive()
        if world.rng.random() < 0.15:
            interfere(world)
        if world.rng.random() < 0.1:
            engine.wake()
            engine.resume()
        world.samples += engine.step()
        engine.parts.kv.check()
    else:
        pytest.fail("the world did not end")
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    return world


def check_sample(world: World, sample: TrainingSample) -> None:
    """Every token is what the version that it claims draws; versions never fall along a sample."""
    ask = world.asked[sample.request_id]
    assert list(sample.token_versions) == sorted(sample.token_versions)
    assert sample.adapter == ask["adapter"] and adapters_of(sample) == sorted(adapters_of(sample))
    tokens, mask, end = replay(
        ask["prompt"],
        ask["params"],
        sample.sample_index,
        [model_of(*pair) for pair in zip(sample.token_versions, adapters_of(sample), strict=True)],
        program=ask["program"],
        matcher=ask["matcher"],
        drawing=world.runner.drawing,
    )
    assert list(sample.completion_tokens) == tokens
    assert list(sample.mask) == mask
    if end is None or (sample.finish_reason == "abort" and not ask["params"].max_tokens):
        assert sample.finish_reason == "abort"
    else:
        assert sample.finish_reason == end
    if sample.token_versions:
        assert sample.weight_version == min(sample.token_versions)
    assert all(sample.version_labels[v] == f"step-{v}" for v in sample.version_labels)
    if ask["params"].prompt_logprobs is not None and sample.finish_reason != "abort":
        check_scores(ask["prompt"], sample)


def adapters_of(sample: TrainingSample) -> list[int]:
    """Return the number of the adapter of each token, which is its version."""
    return [int(one) for one in sample.adapter_versions] or [0] * len(sample.token_versions)


def check_scores(prompt: list[int], sample: TrainingSample) -> None:
    """The scores of a prompt are all of one version."""
    newest = max((*sample.token_versions, sample.weight_version))
    adapters = range(100) if sample.adapter else (0,)
    models = [model_of(version, adapter) for version in range(newest + 1) for adapter in adapters]
    candidates = (tuple(score(tuple(prompt[:i]), prompt[i], one) for i in range(1, len(prompt))) for one in models)
    assert sample.prompt_logprobs in candidates


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(25), marks=pytest.mark.slow), pytest.param(range(25, 300), marks=pytest.mark.nightly)],
    ids=["some", "many"],
)
@pytest.mark.parametrize(
    ("guesses", "lookahead", "overlaps"),
    [(False, 1, False), (True, 1, False), (False, 6, False), (True, 3, False), (False, 1, True), (False, 6, True)],
)
@pytest.mark.parametrize("cache_type", CACHES)
def test_random_worlds_read_no_stale_kv_and_report_true_versions(
    cache_type: str, guesses: bool, lookahead: int, overlaps: bool, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    num_mixed = num_preempted = num_spanning = num_drafted = 0
    for seed in seeds:
        world = run_world(
            make_world(
                seed,
                cache_type,
                tight=seed % 3 > 0,
                guesses=guesses,
                lookahead=lookahead,
                make_engine=partial(versioned_engine, overlaps=overlaps),
            )
        )
        counts["ahead"] += world.engine.overlaps.get("ahead", not overlaps)
        num_drafted += world.runner.num_right + world.runner.num_wrong
        assert len(world.samples) == sum(ask["n"] for ask in world.asked.values())
        for sample in world.samples:
            check_sample(world, sample)
            num_preempted += sample.num_preemptions
            num_spanning += len(set(sample.token_versions)) > 1
        num_mixed += world.runner.num_mixed_reads
        counts += world.counts
        counts["aborted"] += len(world.aborted)
    assert min(counts.values()) > 1, counts
    assert min(num_mixed, num_preempted, num_spanning) > 8
    assert (num_drafted > 40) == guesses
