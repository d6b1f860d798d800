"""Random worlds with updates, pauses, sleeps, aborts and preemptions at random moments."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import get_args

import pytest

from nano_inference.engine import InferenceEngine
from nano_inference.types import OnRunning, SamplingParams, TrainingSample, WeightError
from tests.sim.fakes import Calculator, StopAfter, fake_config
from tests.sim.versioned import (
    VersionedRunner,
    new_weights,
    next_token,
    parrot,
    replay,
    score,
    versioned_engine,
)

CACHES = ("paged", "radix")


@dataclass
class World:
    """One random history under changing weights."""

    rng: random.Random
    engine: InferenceEngine
    arrivals: list[dict[str, object]]
    asked: dict[int, dict[str, object]] = field(default_factory=dict)
    samples: list[TrainingSample] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def runner(self) -> VersionedRunner:
        assert isinstance(self.engine.parts.runner, VersionedRunner)
        return self.engine.parts.runner

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def make_world(
    seed: int,
    cache_type: str,
    *,
    guesses: bool = False,
    lookahead: int = 1,
) -> World:
    """Any world; with `guesses`, of a model that repeats itself, and with speculation."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = -(-rng.choice([80, 80, 400]) // block_size)
    limits = rng.choice([1, 2, 4, 16]), rng.choice([3, 4, 16, 64])
    config = fake_config(*limits, speculation="ngram" if guesses else "off")
    base = [rng.randrange(50) for _ in range(30)]
    arrivals: list[dict[str, object]] = []
    for _ in range(rng.randrange(2, 9)):
        params = SamplingParams(
            max_tokens=rng.randrange(0, 30),
            stop_token_ids=[11] if rng.random() < 0.3 else [],
            ignore_eos=rng.random() < 0.5,
            seed=rng.randrange(100),
            prompt_logprobs=0 if rng.random() < 0.3 else None,
        )
        ask = {"prompt": base[: rng.randrange(30)] + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]}
        ask |= {"params": params, "n": rng.randrange(1, 5)}
        arrivals.append(ask | {"program": rng.random() < 0.4, "matcher": rng.random() < 0.3})
    drawing = parrot if guesses else next_token
    engine = versioned_engine(cache_type, num_blocks, block_size, config, drawing, lookahead)
    return World(rng, engine, arrivals)


def arrive(world: World) -> None:
    ask = world.arrivals.pop(0)
    matcher, program = StopAfter if ask["matcher"] else None, Calculator() if ask["program"] else None
    request_id = world.engine.add_request(ask["prompt"], ask["params"], ask["n"], make_matcher=matcher, program=program)
    world.asked[request_id] = ask


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
    world.count(how)


def refuse(world: World) -> None:
    """An update that cannot be used changes nothing."""
    version = world.engine.get_weight_version()
    broken = new_weights()
    broken["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(WeightError):
        world.engine.update_weights(broken, blocking=True)
    assert world.engine.get_weight_version() == version
    world.count("refused")


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
        world.count("pause")
    elif action == "resume":
        engine.resume()
    elif action == "sleep":
        engine.sleep()
        world.runner.oldest = engine.get_weight_version()
        world.count("sleep")
    elif action == "wake":
        engine.wake()
    elif action == "flush":
        engine.flush_cache()
    elif action == "abort" and world.asked:
        partial = engine.abort(rng.choice(list(world.asked)))
        world.samples += partial
        world.counts["aborted"] = world.counts.get("aborted", 0) + len(partial)


def run_world(world: World) -> World:
    engine = world.engine
    for _ in range(20_000):
        if not world.arrivals and not engine.has_pending() and not (engine.is_paused or engine.is_asleep):
            break
        while world.arrivals and world.rng.random() < 0.5:
            arrive(world)
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
    tokens, mask, end = replay(
        ask["prompt"],
        ask["params"],
        sample.sample_index,
        sample.token_versions,
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


def check_scores(prompt: list[int], sample: TrainingSample) -> None:
    """The scores of a prompt are all of one version."""
    newest = max((*sample.token_versions, sample.weight_version))
    candidates = [tuple(score(prompt[:i], prompt[i], v) for i in range(1, len(prompt))) for v in range(newest + 1)]
    assert sample.prompt_logprobs in candidates


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(25), marks=pytest.mark.slow), pytest.param(range(25, 300), marks=pytest.mark.nightly)],
    ids=["some", "many"],
)
@pytest.mark.parametrize(("guesses", "lookahead"), [(False, 1), (True, 1), (False, 6), (True, 3)])
@pytest.mark.parametrize("cache_type", CACHES)
def test_random_worlds_read_no_stale_kv_and_report_true_versions(
    cache_type: str, guesses: bool, lookahead: int, seeds: range
) -> None:
    counts: dict[str, int] = {}
    num_mixed = num_preempted = num_spanning = num_drafted = 0
    for seed in seeds:
        world = run_world(make_world(seed, cache_type, guesses=guesses, lookahead=lookahead))
        num_drafted += world.runner.num_drafted
        assert len(world.samples) == sum(ask["n"] for ask in world.asked.values())
        for sample in world.samples:
            check_sample(world, sample)
            num_preempted += sample.num_preemptions
            num_spanning += len(set(sample.token_versions)) > 1
        num_mixed += world.runner.num_mixed_reads
        counts = {key: counts.get(key, 0) + world.counts.get(key, 0) for key in counts.keys() | world.counts.keys()}
    assert min(counts.values()) > 1, counts
    assert min(num_mixed, num_preempted, num_spanning) > 8
    assert (num_drafted > 40) == guesses
