"""Adapters that are loaded, replaced, evicted and unloaded at random moments, on a runner that fails at stale K/V."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nano_inference.types import BadRequest, SamplingParams, TrainingSample, UpdateBusy
from tests.sim.fakes import fake_engine, is_idle, load, model_of, replay, score
from tests.sim.test_versions import adapters_of, check_sample, interfere, run_world
from tests.sim.versioned import versioned_engine
from tests.sim.worlds import World, make_world

PROMPT = [5, 9, 30, 2, 44, 8, 8, 1]
PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)


def small_engine(*args: Any, **options: Any) -> Any:
    cache_type, num_blocks, block_size, config, drawing, lookahead = args
    config = replace(config, max_adapters=2)
    return versioned_engine(cache_type, num_blocks, block_size, config, drawing, lookahead, **options)


def adapt(world: World, how: list[str]) -> None:
    """Do one random thing with adapters, or what `test_versions` does."""
    engine, rng = world.engine, world.rng
    action = rng.choice(["load", "load", "load", "unload", "other"])
    if action == "other":
        interfere(world)
    elif action == "load":
        try:
            load(engine, rng.choice("abc"), on_running=rng.choice(how))
            world.counts["load"] += 1
        except UpdateBusy:
            world.counts["no room"] += 1
        assert len(engine.parts.runner.adapters) <= 2
    else:
        world.counts["unload"] += engine.unload_adapter(rng.choice("abc"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [["keep"], ["keep", "continue"]], ids=["keep", "continue"])
@pytest.mark.parametrize(
    ("cache_type", "guesses", "lookahead", "options"),
    [
        ("radix", False, 1, {}),
        ("paged", False, 3, {"overlaps": True}),
        ("radix", False, 6, {"overlaps": True}),
        ("radix", True, 1, {"num_states": 6}),
    ],
)
def test_random_worlds_read_no_kv_of_another_adapter(
    cache_type: str, guesses: bool, lookahead: int, options: dict[str, Any], how: list[str]
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(40):
        make_engine = partial(small_engine, **options)
        tight = seed % 3 > 0
        world = make_world(seed, cache_type, tight=tight, guesses=guesses, lookahead=lookahead, make_engine=make_engine)
        for name in "ab":
            load(world.engine, name)
        run_world(world, partial(adapt, how=how))
        assert len(world.samples) == sum(ask["n"] for ask in world.asked.values())
        used: dict[int, set[int]] = {}
        for sample in world.samples:
            check_sample(world, sample)
            used.setdefault(sample.request_id, set()).update(adapters_of(sample))
            counts["preempted"] += sample.num_preemptions > 0 and sample.adapter is not None
            counts["cached"] += sample.num_cached_tokens > 0 and sample.adapter is not None
        counts["mixed"] += sum(len(one) > 1 for one in used.values())
        counts += world.counts
        counts["ahead"] += world.engine.overlaps.get("ahead", 0)
        world.engine.step()
        assert {one.version for one in world.engine.adapters()} == set(world.engine.parts.runner.adapters)
    assert min(counts[name] for name in ("load", "unload", "no room", "preempted", "cached")) > 5, counts
    assert (counts["ahead"] > 5) == ("overlaps" in options)
    assert (counts["mixed"] > 5) == ("continue" in how), "with keep, all samples of a request have one version"


def by(*adapters: int) -> tuple[int, ...]:
    """Return the tokens of a sample whose tokens are of these adapters."""
    versions = [model_of(0, one) for one in adapters] + [model_of(0, adapters[-1])] * (12 - len(adapters))
    return tuple(replay(PROMPT, PARAMS, 0, versions)[0])


@pytest.mark.parametrize("on_running", ["keep", "continue"])
def test_update_in_mid_run(on_running: Any) -> None:
    engine = fake_engine()
    assert load(engine, "a", version="old") == "old"
    first = engine.add_request(PROMPT, PARAMS, adapter="a")
    for _ in range(4):
        engine.step()
    late = engine.add_request(PROMPT, PARAMS, adapter="a")
    assert load(engine, "a", version="new", on_running=on_running) == "new"
    samples = {sample.request_id: sample for _ in range(20) for sample in engine.step()}
    num_old = 4 if on_running == "continue" else 12
    assert samples[first].adapter_versions == ("old",) * num_old + ("new",) * (12 - num_old)
    assert samples[first].completion_tokens == by(*[1] * num_old, 2)
    assert samples[late].adapter_versions == ("new",) * 12 and samples[late].completion_tokens == by(2)
    assert samples[late].num_cached_tokens == 0 and is_idle(engine)
    (again,) = engine.generate([PROMPT], PARAMS, adapter="a")
    assert again.num_cached_tokens == len(PROMPT) - 1 and engine.parts.runner.adapters == {2: "a"}
    assert TrainingSample.from_dict(json.loads(json.dumps(samples[first].to_dict()))) == samples[first]


def test_scores_and_samples_of_a_group_are_of_one_adapter() -> None:
    """A load starts a prompt that is scored again if its request continues with the new adapter."""
    for on_running, adapter in (("keep", 1), ("continue", 2)):
        engine = fake_engine(max_tokens_per_batch=4, max_batch_size=2)
        load(engine, "a")
        engine.add_request(PROMPT, replace(PARAMS, prompt_logprobs=0, max_tokens=3), 3, adapter="a")
        engine.step()
        load(engine, "a", on_running=on_running)
        samples = [sample for _ in range(30) for sample in engine.step()]
        scores = tuple(score(tuple(PROMPT[:i]), PROMPT[i], model_of(0, adapter)) for i in range(1, len(PROMPT)))
        assert [sample.prompt_logprobs for sample in samples] == [scores] * 3
        assert {sample.adapter_versions for sample in samples} == {(adapter,) * 3}


def test_request_names_an_adapter_that_is_loaded() -> None:
    engine = fake_engine()
    load(engine, "a")
    load(engine, "b")
    with pytest.raises(BadRequest, match=r"adapter: 'c' is not loaded, or was evicted; loaded: a, b"):
        engine.generate([PROMPT, PROMPT], PARAMS, adapter="c")
    running = engine.add_request(PROMPT, PARAMS, adapter="a")
    engine.step()
    assert [(one.name, one.num_requests) for one in engine.adapters()] == [("a", 1), ("b", 0)]
    assert engine.unload_adapter("a") and not engine.unload_adapter("a")
    with pytest.raises(BadRequest, match="'a' is not loaded"):
        engine.score(PROMPT, adapter="a")
    assert 1 in engine.parts.runner.adapters
    (sample,) = [sample for _ in range(20) for sample in engine.step()]
    assert (sample.request_id, sample.completion_tokens) == (running, by(1))
    assert engine.parts.runner.adapters == {2: "b"}


def test_resumed_sample_continues_with_the_current_version() -> None:
    engine = fake_engine()
    load(engine, "a")
    request = engine.add_request(PROMPT, PARAMS, adapter="a")
    for _ in range(3):
        engine.step()
    partial = engine.abort(request)
    load(engine, "a", version="new")
    (whole,) = engine.complete(partial, PARAMS)
    assert whole.adapter_versions == (1,) * 3 + ("new",) * 9 and whole.completion_tokens == by(1, 1, 1, 2)
    with pytest.raises(BadRequest, match="partial: was computed with the adapter a, requested is None"):
        engine.add_request(PROMPT, PARAMS, partial=partial[0])


def test_room_for_adapters() -> None:
    """Idle ones are evicted, the least recently used first; those in use are not, nor is anything if that is vain."""
    engine = fake_engine(max_adapters=3)
    for name in "abc":
        load(engine, name)
    engine.generate([PROMPT], PARAMS, adapter="a")
    load(engine, "d")
    assert [one.name for one in engine.adapters()] == ["a", "c", "d"]
    for name in "cd":
        engine.add_request(PROMPT, PARAMS, adapter=name)
    engine.step()
    with pytest.raises(UpdateBusy, match="'e' does not fit beside those that requests use: max_adapters=3"):
        load(engine, "e", num_bytes=2**30)
    assert [one.name for one in engine.adapters()] == ["a", "c", "d"]
    load(engine, "c")  # beside the one in use
    assert [one.name for one in engine.adapters()] == ["d", "c"] and len(engine.parts.runner.adapters) == 3
    load(engine, "c")  # in place of the one that nobody used
    assert sorted(engine.parts.runner.adapters) == [3, 4, 6]
    load(engine, "c", on_running="continue")
    assert len(engine.parts.runner.adapters) == 2
    with pytest.raises(BadRequest, match="adapter: 'e' has 1073741825 bytes, adapter_memory is 1073741824"):
        load(engine, "e", num_bytes=2**30 + 1)


def test_a_thousand_loads_leave_nothing_behind() -> None:
    engine = fake_engine()

    def turn(number: int) -> None:
        for name in ("a", f"policy-{number}"):
            load(engine, name)
        engine.add_request(PROMPT, replace(PARAMS, max_tokens=0), adapter="a")
        engine.step()
        engine.unload_adapter(f"policy-{number}")
        engine.parts.runner.forget_rows()

    tracemalloc.start()
    try:
        sizes = []
        for number in range(1000):
            turn(number)
            if number in (499, 999):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(engine.parts.runner.adapters) == 1 and sizes[1] < sizes[0] + 20_000, sizes
