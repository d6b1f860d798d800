"""Several tokens of a row in one step, looked ahead or drafted, give the bits of one token a step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.types import EngineRequest, OnRunning, StepStats
from tests.engine.test_batch_invariance import KINDS, ThreadsKept, open_engine
from tests.sim.fakes import Calculator, StopAfter, fake_engine, reference

REPEATING = [5, 9, 30, 2, 44, 5, 9, 30]
AHEAD: dict[str, Any] = {"lookahead": 16}
DRAFTS: dict[str, Any] = {"speculation": "ngram"}


class MaskAfter:
    """A matcher without a mask until it has seen a token below 20; then the next two tokens are below 8, and so on."""

    def __init__(self) -> None:
        self.left = 0

    def advance(self, token: int) -> str | None:
        self.left = self.left - 1 if self.left else 2 * (token < 20)
        return None

    def mask(self) -> bytes | None:
        return b"\xff" if self.left else None


class OneOfOne:
    """A matcher that allows a single token after each multiple of five: it is forced, and has mask 0."""

    def __init__(self) -> None:
        self.is_forcing = False

    def advance(self, token: int) -> str | None:
        self.is_forcing = not self.is_forcing and token % 5 == 0
        return None

    def mask(self) -> bytes | None:
        return b"\x00\x08" if self.is_forcing else None


class ForceOne:
    """A program that forces one token after each multiple of three, and none after that one."""

    def start(self) -> object:
        return None

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        return state, (7,) * (token % 3 == 0)


def repeating_requests() -> list[EngineRequest]:
    """Requests of all kinds, most of which say the same again: greedy, or out of few tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(60) for _ in range(21)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "raw_logprobs": True},
        {"allowed_token_ids": [3, 4]},
        {"allowed_token_ids": [3, 4, 7], "temperature": 0.3, "sampling_mask": True, "logprobs": 3},
        {"temperature": 0.05, "logprobs_mode": "raw"},
        {"temperature": 0.2, "top_k": 3, "prompt_logprobs": 1},
        {"temperature": 0.3, "top_p": 0.5, "logit_bias": {5: 3.0, 6: 3.0}},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0.1, "frequency_penalty": 0.1},
        {"temperature": 0, "min_tokens": 9, "stop_token_ids": list(range(0, 60, 3))},
        {"temperature": 0.1, "min_p": 0.2, "stop_token_ids": [1, 8, 9]},
    ]
    made: list[EngineRequest] = []
    for i, options in enumerate(kinds):
        prompt = shared[: rng.randrange(21)] + [rng.randrange(60) for _ in range(rng.randrange(1, 30))] * (1 + i % 2)
        options |= {"max_tokens": rng.randrange(20, 45), "seed": i, "ignore_eos": True}
        params = SamplingParams(**options)
        made.append(EngineRequest(prompt=prompt, params=params, num_samples=1 + 2 * (i % 3 == 0)))
    return made


def requests() -> list[EngineRequest]:
    """Requests of all kinds: repeating ones, matchers, programs, and what restricts lookahead."""
    rng = random.Random(4)
    found = repeating_requests()
    prompt = [rng.randrange(60) for _ in range(13)]

    def add(num_samples: int = 2, more: dict[str, Any] | None = None, **options: Any) -> None:
        options = {"max_tokens": 33, "seed": len(found), **options}
        params = SamplingParams(**options)
        found.append(EngineRequest(prompt=prompt, params=params, num_samples=num_samples, **(more or {})))

    add(more={"make_matcher": MaskAfter}, logprobs=2)
    add(more={"make_matcher": OneOfOne}, raw_logprobs=True, sampling_mask=True)
    add(more={"make_matcher": StopAfter}, min_tokens=6)
    add(more={"program": Calculator()}, sampling_mask=True, raw_logprobs=True)
    add(more={"program": Calculator(), "make_matcher": MaskAfter})
    add(min_tokens=11, stop_token_ids=list(range(0, 60, 2)))
    add(stop_token_ids=list(range(0, 60, 9)), logprobs=0, ignore_eos=True)
    add(presence_penalty=0.7, min_tokens=3, stop_token_ids=[1, 2, 3])
    add(logprobs=2, logprob_token_ids=[41, 0, 7], top_k=5, raw_logprobs=True)
    add(max_tokens=1)
    add(max_tokens=2, prompt_logprobs=1)
    add(num_samples=1, max_tokens=0, prompt_logprobs=0)
    add(more={"program": ForceOne()})
    return found


REQUESTS = requests()


def run_all(
    engine: InferenceEngine, wanted: list[EngineRequest] = REQUESTS
) -> tuple[list[TrainingSample], list[StepStats]]:
    """Run everything at once; fields that depend on how it was computed are cleared."""
    ids = [engine.add(request, claim=True) for request in wanted]
    stats = []
    while engine.has_pending():
        stats.append(engine.tick().stats)
        engine.parts.kv.check()
    samples = [sample for one in ids for sample in engine.collect(one)]
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    return [bare(sample) for sample in samples], stats


def bare(sample: TrainingSample) -> TrainingSample:
    return replace(sample, num_cached_tokens=0, num_preemptions=0, lineage=None, request_id=0)


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    write, options = KINDS[request.param]
    path = write(tmp_path_factory.mktemp("kind"))
    with ThreadsKept(), open_engine(path, **options) as engine:
        samples, stats = run_all(engine)
    return path, options, samples, len(stats)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        AHEAD,
        DRAFTS | {"max_tokens_per_batch": 25, "block_size": 4},
        DRAFTS | {"cache_type": "paged", "num_threads": 2, "max_batch_size": 3, "max_draft_tokens": 11},
    ],
    ids=["lookahead", "drafts in chunks", "drafts in a paged cache"],
)
def test_several_tokens_a_step_change_no_bit(kind: Any, more: dict[str, Any]) -> None:
    path, options, expected, num_steps = kind
    with open_engine(path, **options, **more) as engine:
        samples, stats = run_all(engine)
    assert samples == expected
    assert len(stats) < num_steps or more is not AHEAD
    assert (0 < sum(one.num_accepted for one in stats) < sum(one.num_drafted for one in stats)) == (more is not AHEAD)


@pytest.mark.slow
def test_every_lookahead_gives_the_same_bits(tiny_llama: Path) -> None:
    with open_engine(tiny_llama) as engine:
        expected, _ = run_all(engine)
    for lookahead in (2, 3, 7, 11):
        with open_engine(tiny_llama, lookahead=lookahead) as engine:
            assert run_all(engine)[0] == expected, lookahead


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"cache_type": "paged", "block_size": 4, "max_batch_size": 5},
        {"max_tokens_per_batch": 25, "block_size": 1, "num_threads": 2},
        {"speculation": "ngram", "max_draft_tokens": 7},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_lookahead_changes_no_bit_beside_other_options(tiny_llama: Path, options: dict[str, Any]) -> None:
    with open_engine(tiny_llama) as engine:
        expected, _ = run_all(engine)
    with open_engine(tiny_llama, **options, lookahead=6) as engine:
        samples, stats = run_all(engine)
    assert samples == expected
    assert (sum(one.num_accepted for one in stats) > 0) == ("speculation" in options)


@pytest.mark.parametrize("more", [{"lookahead": 4}, DRAFTS], ids=["lookahead", "drafts"])
def test_several_tokens_a_step_change_no_bit_with_preemption(tiny_llama: Path, more: dict[str, Any]) -> None:
    wanted = [replace(one, params=replace(one.params, max_tokens=min(25, one.params.max_tokens))) for one in REQUESTS]
    with open_engine(tiny_llama, block_size=4) as engine:
        expected, _ = run_all(engine, wanted)
        block_bytes = engine.parts.executor.cache.block_bytes(4)
    tight = {"block_size": 4, "kv_cache_bytes": 45 * block_bytes, "max_tokens_per_batch": 32}
    with open_engine(tiny_llama, **tight, **more) as engine:
        samples, stats = run_all(engine, wanted)
    assert samples == expected
    assert sum(one.num_preempted for one in stats) > 0
    assert sum(one.num_accepted if more is DRAFTS else one.num_sampled > one.num_rows for one in stats) > 3


class MaskOnce:
    """A matcher that has a mask after the sixth token only."""

    def __init__(self) -> None:
        self.num_seen = 0

    def advance(self, token: int) -> str | None:
        self.num_seen += 1
        return None

    def mask(self) -> bytes | None:
        return b"\xff" * 7 if self.num_seen == 6 else None


def test_tokens_after_one_that_sets_a_mask_are_sampled_again() -> None:
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
    engine = fake_engine(lookahead=4)
    request = engine.add_request(REPEATING, params, make_matcher=MaskOnce, claim=True)
    counts = []
    while engine.has_pending():
        counts.append(engine.tick().stats.num_sampled)
    assert counts == [1, 4, 1, 1, 4, 1]
    assert list(engine.collect(request)[0].completion_tokens) == reference(REPEATING, params, 0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"lookahead": 5}, DRAFTS], ids=["lookahead", "drafts"])
def test_torch_samples_the_same_tokens(tiny_llama: Path, more: dict[str, Any]) -> None:
    with open_engine(tiny_llama, kernels="off") as engine:
        expected, _ = run_all(engine)
    with open_engine(tiny_llama, kernels="off", **more) as engine:
        samples, _ = run_all(engine)
    for ours, theirs in zip(samples, expected, strict=True):
        assert (ours.completion_tokens, ours.finish_reason) == (theirs.completion_tokens, theirs.finish_reason)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


PLAIN = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, logprobs=1)


def run_until(engine: InferenceEngine, num_tokens: int) -> int:
    """Start three samples and run steps until each has `num_tokens`; return the request."""
    request = engine.add_request(REPEATING, PLAIN, 3, claim=True)
    found = [0, 0, 0]
    while min(found) < num_tokens:
        for delta in engine.tick().deltas:
            found[delta.sample_index] += len(delta.token_ids)
    assert found == [num_tokens + 1, num_tokens, num_tokens]  # the first computes the prompt for the others
    return request


def finish(engine: InferenceEngine, request: int) -> list[TrainingSample]:
    while engine.has_pending():
        engine.tick()
    return [bare(sample) for sample in engine.collect(request)]


@pytest.mark.parametrize("on_running", ["keep", "recompute", "abort", "wait"])
@pytest.mark.parametrize("lookahead", [2, 16])
def test_updates_between_steps_that_look_ahead(tiny_llama: Path, lookahead: int, on_running: OnRunning) -> None:
    found = []
    for one in (1, lookahead):
        with open_engine(tiny_llama, lookahead=one) as engine:
            assert engine.parts.executor is not None
            weights = {name: value * 1.25 for name, value in engine.parts.executor.weights.values()}
            request = run_until(engine, 1 + 2 * lookahead)
            engine.update_weights(weights, blocking=True, on_running=on_running)
            found.append(finish(engine, request))
    assert found[0] == found[1]
    for index, sample in enumerate(found[1]):
        num_old = 40 if on_running == "wait" else 1 + 2 * lookahead + (index == 0)
        num_new = 40 - num_old if on_running in ("keep", "recompute") else 0
        assert sample.token_versions == (0,) * num_old + (1,) * num_new


@pytest.mark.parametrize("lookahead", [2, 16])
def test_aborted_samples_resume_with_the_same_tokens(tiny_llama: Path, lookahead: int) -> None:
    with open_engine(tiny_llama, lookahead=1) as engine:
        expected = finish(engine, run_until(engine, 1))
    with open_engine(tiny_llama, lookahead=lookahead) as engine:
        engine.abort(request := run_until(engine, 1 + lookahead))
        partial = engine.collect(request)
        assert [len(sample.completion_tokens) for sample in partial] == [2 + lookahead, 1 + lookahead, 1 + lookahead]
        for sample, whole in zip(partial, expected, strict=True):
            assert sample.completion_tokens == whole.completion_tokens[: len(sample.completion_tokens)]
            assert sample.top_logprobs == whole.top_logprobs[: len(sample.completion_tokens)]
        completed = [bare(sample) for sample in engine.complete(partial, PLAIN)]
    assert completed == expected


def test_steps_are_short_while_an_update_is_gathered(tiny_llama: Path) -> None:
    with open_engine(tiny_llama, lookahead=16) as engine:
        assert engine.parts.executor is not None
        weights = [(name, value.clone()) for name, value in engine.parts.executor.weights.values()]
        engine.add_request(REPEATING, PLAIN)
        engine.tick()
        assert engine.tick().stats.num_sampled == 16

        stepped = Event()

        def slow() -> Iterator[tuple[str, torch.Tensor]]:
            stepped.wait()
            yield from weights

        engine.update_weights(slow())
        assert engine.tick().stats.num_sampled == 1
        stepped.set()
        engine.finish_update()
        assert engine.tick().stats.num_sampled == 16
