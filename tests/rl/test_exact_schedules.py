"""A sample has the log-probabilities of its score under every schedule: preempted, chunked, drafted, resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference import EngineConfig, InferenceEngine, RolloutPool, SamplingParams, TrainingSample
from nano_inference.core.admission import scoring_requests
from nano_inference.rl.exact import Policy, train_logprobs
from nano_inference.rl.pool.local import LocalFleet
from nano_inference.types import EngineRequest, OnRunning
from tests.models.families import make_model
from tests.nanochat.tiny import write_checkpoint

PROMPTS = [[7, 3, 99, 21, 4, 60], [12], list(range(30, 70)), [5, 6, 5, 6, 5, 6, 5]]
PARAMS = SamplingParams(max_tokens=48, seed=5, temperature=0.8)
COUNT = 3
COLD = 0.1
BLOCK = 8192  # bytes of 16 tokens


@dataclass(frozen=True)
class Trainer:
    model: transformers.PreTrainedModel
    path: Path
    policy: Policy
    """On an engine that runs nothing else."""

    def open(self, **options: Any) -> InferenceEngine:
        return InferenceEngine(EngineConfig(str(self.path), dtype="float32", device="cpu", **options))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    path = tmp_path_factory.mktemp("schedules")
    model = make_model("llama3-rope-ratio3-tied", path)
    with InferenceEngine(EngineConfig(str(path), dtype="float32", device="cpu", num_threads=1)) as engine:
        policy = Policy(engine, model)
        policy.sync()
        yield Trainer(model, path, policy)


def run(engine: InferenceEngine, *requests: EngineRequest, more: tuple[int, ...] = ()) -> list[TrainingSample]:
    """Run requests, and those of the ids `more`, to their end; return the samples of the former."""
    asked = [engine.add(one, claim=True) for one in requests]
    left = {*asked, *more}
    while left:
        left.difference_update(engine.wait_for_any(left))
    return [sample for one in asked for sample in engine.collect(one)]


def generated(engine: InferenceEngine, params: SamplingParams = PARAMS) -> list[TrainingSample]:
    return engine.generate(PROMPTS, params, COUNT)


def drafted(engine: InferenceEngine) -> list[TrainingSample]:
    """Generate with draft tokens, some of which are accepted: cold samples soon repeat themselves."""
    params = replace(PARAMS, temperature=COLD, max_tokens=120, ignore_eos=True)
    asked = [engine.add_request(prompt, params, COUNT, claim=True) for prompt in PROMPTS]
    accepted = 0
    while engine.has_pending():
        accepted += engine.tick().stats.num_accepted
    assert accepted > 0
    return [sample for one in asked for sample in engine.collect(one)]


def resumed(engine: InferenceEngine) -> list[TrainingSample]:
    """Abort all samples in the middle, and complete them."""
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    for _ in range(9):
        engine.step()
    parts = engine.abort_all()
    assert all(0 < len(one.completion_tokens) < 48 for one in parts) and len(parts) == len(PROMPTS)
    return engine.complete(parts, PARAMS)


def cached(engine: InferenceEngine) -> list[TrainingSample]:
    generated(engine)
    found = generated(engine)
    assert sum(one.num_cached_tokens for one in found) > 40
    return found


def preempted(engine: InferenceEngine) -> list[TrainingSample]:
    found = generated(engine)
    assert sum(one.num_preemptions for one in found) > 3
    return found


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[InferenceEngine], list[TrainingSample]]]] = {
    "preemption": ({"kv_cache_bytes": 13 * BLOCK}, preempted),
    "chunks": ({"max_tokens_per_batch": 16, "max_batch_size": 16}, generated),
    "drafts": ({"speculation": "ngram", "kv_cache_bytes": 64 * BLOCK}, drafted),
    "prefix hits": ({}, cached),
    "one thread": ({"num_threads": 1}, generated),
    "two threads": ({"num_threads": 2}, generated),
    "resumed": ({}, resumed),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_leaves_sampled_and_scored_values(name: str, trainer: Trainer) -> None:
    options, sample = SCHEDULES[name]
    temperature = COLD if name == "drafts" else 0.8
    with trainer.open(**options) as engine:
        samples = sample(engine)
        expected = torch.tensor([value for one in samples for value in one.logprobs])
        assert len(expected) > 150
        assert torch.equal(train_logprobs(trainer.policy, samples, temperature=temperature), expected)
        own = Policy(engine, trainer.model)
        own.sync()
        for _ in range(2):  # the second time from the cache
            assert torch.equal(train_logprobs(own, samples, temperature=temperature), expected)


def test_pool_of_two_samples_what_one_engine_scores(trainer: Trainer) -> None:
    with RolloutPool(LocalFleet(lambda index: trainer.open(num_threads=1 + index), 2), seed=0) as pool:
        samples = pool.generate(PROMPTS, PARAMS, COUNT)
    expected = torch.tensor([value for one in samples for value in one.logprobs])
    assert torch.equal(train_logprobs(trainer.policy, samples, temperature=0.8), expected)


# ---- requests that score ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama3-rope-ratio3-tied", "gemma2", "nanochat, full decode"])
def test_preempted_score_is_the_undisturbed_one(kind: str, tmp_path: Path) -> None:
    overrides: tuple[str, ...] = ()
    if kind.startswith("nanochat"):
        write_checkpoint(tmp_path, "G2")
        overrides = ("decode_window=full", "short_window=24")
    else:
        make_model(kind, tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "overrides": overrides, "num_threads": 1}
    params = SamplingParams(max_tokens=70, seed=5, temperature=0.8, ignore_eos=True)
    prompts = [list(range(30, 30 + length)) for length in (50, 20, 5, 30)]
    with InferenceEngine(EngineConfig(str(tmp_path), kv_cache_bytes=16 << 20, **options)) as engine:
        samples = engine.generate(prompts, params)
        assert engine.parts.executor is not None
        room = 60 * engine.parts.executor.cache.block_bytes(4)
    texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
    requests = scoring_requests(texts, [len(one) for one in prompts], 0.8, None)
    small = EngineConfig(str(tmp_path), kv_cache_bytes=room, block_size=4, max_tokens_per_batch=8, **options)
    with InferenceEngine(small) as engine:
        busy = tuple(engine.add_request([9 + i] * 20, params, claim=True) for i in range(3))
        for _ in range(12):  # their prompts, and some tokens
            engine.tick()
        scored = run(engine, *requests, more=busy)
    assert sum(one.num_preemptions for one in scored) > 0
    assert [one.prompt_logprobs for one in scored] == [one.logprobs for one in samples]


# ---- updates in flight ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_running", ["recompute", "keep"])
def test_tokens_after_an_update_in_flight(on_running: OnRunning, trainer: Trainer) -> None:
    """Equal where their K/V was computed anew; not where it is of older weights."""
    with trainer.open() as engine:
        asked = [engine.add_request(prompt, PARAMS, COUNT, claim=True) for prompt in PROMPTS]
        for _ in range(9):
            engine.tick()
        named = {name: value.detach() * 1.05 for name, value in trainer.model.named_parameters()}
        engine.update_weights(named, on_running=on_running)
        engine.finish_update()
        samples = []
        for one in asked:
            engine.wait_for_any([one])
            samples += engine.collect(one)
        borders = [one.token_versions.index(1) for one in samples]
        assert all(0 < border < 48 for border in borders)
        texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
        starts = [len(one.prompt_tokens) + border for one, border in zip(samples, borders, strict=True)]
        found = engine.score(texts, starts, temperature=0.8)
    equal = [list(one.logprobs[border:]) == row for one, border, row in zip(samples, borders, found, strict=True)]
    assert equal == [on_running == "recompute"] * len(samples)
