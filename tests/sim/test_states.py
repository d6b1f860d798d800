"""Random histories of engines with slots of recurrent states: a row that uses a wrong slot fails (`FakeRunner`)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams
from tests.sim.fakes import fake_config, fake_parts
from tests.sim.test_versions import check_sample, run_world
from tests.sim.versioned import versioned_engine
from tests.sim.worlds import make_world


def history(seed: int) -> Counter[str]:
    """Run one random history; return what happened in it."""
    rng = random.Random(seed)
    guesses = seed % 2 == 1
    num_states = rng.choice([2, 3, 4, 6, 10, 20, 60])
    make_engine = partial(versioned_engine, num_states=num_states)
    lookahead = 1 if guesses else rng.choice([1, 1, 2, 5])
    world = make_world(seed, "radix", tight=seed % 3 > 0, guesses=guesses, lookahead=lookahead, make_engine=make_engine)
    counts: Counter[str] = Counter()
    run_world(world)
    assert world.engine.parts.kv.states.num_held == 0
    assert len(world.samples) == sum(ask["n"] for ask in world.asked.values())
    for sample in world.samples:
        check_sample(world, sample)
        counts["preempted"] += sample.num_preemptions
        counts["cached"] += sample.num_cached_tokens > 0
        counts["mixed"] += len(set(sample.token_versions)) > 1
    counts["accepted"] += world.runner.num_right
    counts["rejected"] += world.runner.num_wrong
    counts["aborted"] += len(world.aborted)
    return counts


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(60), marks=pytest.mark.slow), pytest.param(range(60, 10_060), marks=pytest.mark.nightly)],
    ids=["some", "many"],
)
def test_no_row_of_a_random_history_uses_a_wrong_slot(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += history(seed)
    names = ("preempted", "cached", "mixed", "accepted", "rejected", "aborted")
    assert all(counts[name] > len(seeds) // 6 for name in names), counts
