"""Random histories of engines with slots of recurrent states: a row that uses a wrong slot fails (`FakeRunner`)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams, TrainingSample
from tests.sim.fakes import fake_config, fake_parts, is_idle, raising, reference
from tests.sim.test_versions import check_sample, run_world
from tests.sim.versioned import versioned_engine
from tests.sim.worlds import World, make_world

ONE = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)


def history(seed: int) -> Counter[str]:
    """Run one random history, of two turns if the seed is a multiple of 4; return what happened in it."""
    rng = random.Random(seed)
    guesses = seed % 2 == 1
    num_states = rng.choice([2, 3, 4, 6, 10, 20, 60])
    make_engine = partial(versioned_engine, num_states=num_states, overlaps=seed % 4 < 2)
    lookahead = 1 if guesses else rng.choice([1, 1, 2, 5])
    world = make_world(seed, "radix", tight=seed % 3 > 0, guesses=guesses, lookahead=lookahead, make_engine=make_engine)
    fail_sometimes(world, rng)
    counts: Counter[str] = Counter()
    for _ in range(2 if seed % 4 == 0 else 1):
        run_world(world)
        assert world.engine.parts.kv.states.num_held == 0
        world.arrivals = next_turns(world, rng)
    assert len(world.samples) == sum(ask["n"] for ask in world.asked.values())
    for sample in world.samples:
        check_sample(world, sample)
        counts["preempted"] += sample.num_preemptions
        counts["cached"] += sample.num_cached_tokens > 0
        counts["mixed"] += len(set(sample.token_versions)) > 1
    counts["accepted"] += world.runner.num_right
    counts["rejected"] += world.runner.num_wrong
    counts["aborted"] += len(world.aborted)
    assert "ahead" not in world.engine.overlaps, "a state would be read before it is settled"
    counts["not ahead"] += world.engine.overlaps.get("choice", 0)
    return counts


def fail_sometimes(world: World, rng: random.Random) -> None:
    """Let some steps fail after they have written states."""
    step = world.engine.step

    def step_or_fail() -> list[TrainingSample]:
        world.runner.on_step = raising(InterruptedError(), world.runner.num_steps + 1 if rng.random() < 0.03 else 0)
        try:
            return step()
        except InterruptedError:
            return []
        finally:  # a call that ran no step leaves none to fail later, in an update
            world.runner.on_step = raising(InterruptedError(), 0)

    world.engine.step = step_or_fail  # type: ignore[method-assign]


def next_turns(world: World, rng: random.Random) -> list[dict[str, object]]:
    """Continue some of the samples."""
    chosen = rng.sample(world.samples, min(2, len(world.samples)))
    turns = [(world.asked[one.request_id], (*one.prompt_tokens, *one.completion_tokens)) for one in chosen]
    return [
        ask | {"prompt": [*tokens, *(rng.randrange(50) for _ in range(3))]} for ask, tokens in turns if len(tokens) < 48
    ]


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(60), marks=pytest.mark.slow), pytest.param(range(60, 10_060), marks=pytest.mark.nightly)],
    ids=["some", "many"],
)
def test_no_row_of_a_random_history_uses_a_wrong_slot(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += history(seed)
    names = ("preempted", "cached", "mixed", "accepted", "rejected", "aborted", "not ahead")
    assert all(counts[name] > len(seeds) // 6 for name in names), counts


def state_engine(num_states: int, num_blocks: int = 400, **options: object) -> InferenceEngine:
    """An engine with blocks of 4 tokens; `options` are those of `fake_config`."""
    parts = fake_parts("radix", num_blocks, 4, num_states=num_states)
    return InferenceEngine(fake_config(**options), parts=parts)


def cached(engine: InferenceEngine, *prompts: list[int], params: SamplingParams = ONE, n: int = 1) -> list[int]:
    """Generate at the same time; return how many tokens of each prompt were cached."""
    return [sample.num_cached_tokens for sample in engine.generate(list(prompts), params, n)]


def test_next_turn_starts_at_the_end_of_the_answer() -> None:
    engine = state_engine(8)
    first = engine.generate([list(range(10, 33))], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))[0]
    turn = [*first.prompt_tokens, *first.completion_tokens, 1, 2]
    assert cached(engine, turn) == [len(turn) - 3]  # the last drawn token was never computed


def test_third_prompt_behind_a_shared_system_prompt_hits() -> None:
    engine = state_engine(20)
    system = list(range(20, 43))
    prompts = [[*system, *[last] * 9] for last in (1, 2, 3)]
    assert [cached(engine, prompt) for prompt in prompts] == [[0], [0], [len(system)]]


@pytest.mark.parametrize(("shared", "expected"), [(200, [0, 0] + [200] * 6), (40, [0] * 8)])
def test_prompts_behind_a_new_system_prompt_wait_for_its_snapshot(shared: int, expected: list[int]) -> None:
    engine = state_engine(40, max_tokens_per_batch=512)
    system = [token % 50 for token in range(shared)]
    assert cached(engine, *([*system, *[last] * 20] for last in range(8))) == expected
    assert engine.parts.runner.num_steps <= 3
    assert engine.parts.runner.num_computed <= 8 * 20 + shared * expected.count(0)


def test_prompt_that_shares_part_of_a_long_one_starts_from_a_power_of_two() -> None:
    engine = state_engine(20, max_tokens_per_batch=200)
    long = [token % 50 for token in range(1100)]
    cached(engine, long)
    assert cached(engine, [*long[:900], 7, 7]) == [512]
    assert cached(engine, [*long[:900], 8, 8]) == [900]


def test_samples_and_equal_prompts_compute_the_prompt_once() -> None:
    engine = state_engine(40, max_tokens_per_batch=16, max_batch_size=16)
    prompt = list(range(1, 40))
    assert cached(engine, prompt, n=8) == [0] + [38] * 7
    assert engine.parts.runner.num_computed == 39 + 7
    other = [5, *prompt]
    assert sorted(cached(engine, *[other] * 8)) == [0] + [39] * 7


def test_slots_that_a_step_reads_are_not_overwritten() -> None:
    engine = state_engine(4)
    first = list(range(1, 21))
    cached(engine, first)  # leaves two snapshots, and two blank slots for two sequences
    shared = [*first[:10], *[30] * 9]  # keeps two snapshots of its own, for which there is no slot beside
    assert cached(engine, shared, [*first, 40, 41]) == [0, 20]


@pytest.mark.parametrize("is_right", [True, False])
def test_only_the_tokens_accepted_before_a_rejected_one_are_computed_again(is_right: bool) -> None:
    def draw(seen: tuple[int, ...], *_: int) -> int:
        return seen[-4] if is_right or len(seen) % 7 else 0

    parts = fake_parts("radix", 100, 4, drawing=draw, num_states=2)
    engine = InferenceEngine(fake_config(speculation="ngram"), parts=parts)
    params, prompt = SamplingParams(max_tokens=60, seed=2, ignore_eos=True), [1, 2, 3, 4] * 3
    sample = engine.generate([prompt], params)[0]
    runner = engine.parts.runner
    assert list(sample.completion_tokens) == reference(prompt, params, 0, drawing=draw)[0]
    num_again = runner.num_computed - (len(prompt) + 60 - 1) - runner.num_wrong
    assert runner.num_right > 20 and (runner.num_wrong == num_again == 0) == is_right
    assert num_again < runner.num_right / 2
    assert is_idle(engine)


def test_flushed_and_older_snapshots_are_not_found() -> None:
    engine = state_engine(8)
    prompt = list(range(1, 20))
    cached(engine, prompt)
    assert cached(engine, [*prompt, 1]) == [19]
    engine.flush_cache()
    assert engine.parts.kv.states.num_snapshots == 0
    assert cached(engine, [*prompt, 1]) == [0]


def test_evicted_block_takes_its_snapshots_along() -> None:
    engine = state_engine(20, num_blocks=12)
    prompt = list(range(1, 20))
    cached(engine, prompt)
    cached(engine, [token + 9 for token in range(40)])
    assert cached(engine, [*prompt, 1]) == [0]
    assert is_idle(engine)


def test_snapshots_are_counted() -> None:
    engine = state_engine(8)
    prompt = list(range(1, 20))
    engine.add_request(prompt, ONE)
    stats = engine.tick().stats
    assert (stats.num_state_snapshots, stats.num_state_hits) == (2, 0)
    engine.add_request([*prompt, 1], ONE)
    assert engine.tick().stats.num_state_hits == 1


def hit_rate(engine: InferenceEngine, *, drops_thoughts: bool) -> float:
    """Run ten conversations of six turns in turn; return the part of their prompts' tokens that was cached."""
    rng = random.Random(3)
    system = [rng.randrange(20, 40) for _ in range(60)]
    texts = [list(system) for _ in range(10)]
    num_cached = num_prompt = 0
    for _ in range(6):
        for text in texts:
            text += [rng.randrange(50) for _ in range(rng.randrange(10, 40))]
            params = SamplingParams(max_tokens=rng.randrange(20, 60), seed=rng.randrange(9), ignore_eos=True)
            sample = engine.generate([[*text, 41, 42, 43]], params)[0]  # the answer begins; with a thought
            text += [41, *sample.completion_tokens[10:]] if drops_thoughts else [41, 42, 43, *sample.completion_tokens]
            num_cached, num_prompt = num_cached + sample.num_cached_tokens, num_prompt + len(sample.prompt_tokens)
    return num_cached / num_prompt


@pytest.mark.parametrize(("drops_thoughts", "num_states", "least"), [(False, 24, 0.98), (True, 32, 0.95)])
def test_conversations_hit_nearly_as_often_as_without_states(
    drops_thoughts: bool, num_states: int, least: float
) -> None:
    states, dense = (
        hit_rate(state_engine(count, num_blocks=4000), drops_thoughts=drops_thoughts) for count in (num_states, 0)
    )
    assert least * dense < states <= dense and dense > 0.7, (states, dense)


def test_256_requests_with_20_slots_end_in_the_order_of_their_arrival() -> None:
    engine = state_engine(20, num_blocks=4000, max_batch_size=256)
    ids = [
        engine.add_request([number % 50, *range(10)], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        for number in range(256)
    ]
    ended: list[int] = []
    started: list[int] = []
    most_steps = -(-256 // 10) * (20 + 1)  # a step for the prompts of ten samples, which need few, and one a token
    for _ in range(most_steps):
        result = engine.tick()
        assert result.stats.num_running <= 10 and result.stats.num_preempted == 0
        started += [request_id for request_id, _ in result.started]
        ended += [sample.request_id for sample in result.samples]
    assert started == ids == sorted(ended)


def test_paged_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache_type: .* recurrent states"):
        fake_parts("paged", 100, 4, num_states=4)
