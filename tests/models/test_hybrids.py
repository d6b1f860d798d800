"""Models with layers of the gated delta rule: compared with Transformers, and bit for bit with themselves."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.types import EngineRequest, SamplingParams, TrainingSample
from tests.engine.test_lookahead import run_all
from tests.models.families import VOCAB_SIZE, gap, gap_to, reference_logprobs
from tests.models.hybrids import HYBRIDS, make_hybrid

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
PARAMS = SamplingParams(max_tokens=24, seed=7, ignore_eos=True)
Witness = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=HYBRIDS)
def witness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    directory = tmp_path_factory.mktemp("tiny")
    yield directory, make_hybrid(request.param, directory)


@pytest.fixture(params=["auto", "off"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def engine(directory: Path, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 64 << 20, "device": "cpu", "max_batch_size": 16} | options
    return InferenceEngine(EngineConfig(model_path=str(directory), **options))


def worst(model: transformers.PreTrainedModel, samples: list[TrainingSample]) -> float:
    """Return the largest difference of the samples' log-probabilities from Transformers'."""
    return max(gap(model, [*one.prompt_tokens, *one.completion_tokens], list(one.logprobs)) for one in samples)


def tight(directory: Path, **options: Any) -> tuple[InferenceEngine, int]:
    """Return an engine whose cache has blocks for less than two sequences of so many tokens, and states for two."""
    parts = engine(directory).parts
    assert parts.executor is not None
    state_bytes, block_bytes = parts.executor.program.state_bytes, parts.executor.cache.block_bytes(16)
    num_blocks = max(14, -(-4 * state_bytes // block_bytes))
    return engine(directory, kv_cache_bytes=2 * num_blocks * block_bytes, **options), 10 * num_blocks


def test_scores_match_in_odd_chunks(witness: Witness, kernels: str) -> None:
    directory, model = witness
    ids = text(1, 600)
    expected = reference_logprobs(model, ids)
    for budget, block_size in ((2048, 16), (37, 7), (100, 1)):
        with engine(directory, kernels=kernels, max_tokens_per_batch=budget, block_size=block_size) as ours:
            assert gap_to(expected, ids, ours.score(ids)) <= TOLERANCE, (budget, block_size)
            assert gap(model, ids, ours.score(ids, start=530)) <= TOLERANCE


def test_prefix_hits_match_at_the_end_of_prompt_and_answer(witness: Witness, kernels: str) -> None:
    directory, model = witness
    ids = text(2, 570)
    with engine(directory, kernels=kernels) as ours:
        first, again, longer = (ours.generate([ids[:cut]], PARAMS)[0] for cut in (555, 555, 570))
        assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 554, 554)
        turn = [*longer.prompt_tokens, *longer.completion_tokens, *text(9, 30)]
        answer = ours.generate([turn], PARAMS)[0]
        assert answer.num_cached_tokens == 570 + 23  # the last token's state was never computed
        assert worst(model, [first, again, longer, answer]) <= TOLERANCE


def test_preempted_samples_and_forks_match(witness: Witness, kernels: str) -> None:
    directory, model = witness
    short, length = tight(directory, kernels=kernels, max_tokens_per_batch=64)
    params = replace(PARAMS, max_tokens=length - 50)
    prompts = [text(seed, 20 + 10 * seed) for seed in range(4)]
    with engine(directory, kernels=kernels) as roomy, short:
        expected, samples = roomy.generate(prompts, params), short.generate(prompts, params)
        group = roomy.generate([text(5, 100)], PARAMS, num_samples=8)
    assert [one.num_cached_tokens for one in group] == [0] + [99] * 7
    assert sum(one.num_preemptions for one in samples)
    assert [one.completion_tokens for one in samples] == [one.completion_tokens for one in expected]
    assert worst(model, [*samples, *group]) <= TOLERANCE


def test_updates_sleep_and_embeddings_match(witness: Witness, kernels: str) -> None:
    directory, model = witness[0], copy.deepcopy(witness[1])
    ids = text(3, 200)
    with engine(directory, kernels=kernels) as ours:
        ours.generate([ids], PARAMS)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        ours.update_weights(model.state_dict(), blocking=True)
        sample = ours.generate([ids], PARAMS)[0]
        assert sample.num_cached_tokens == 0
        ours.sleep()
        ours.wake()
        assert worst(model, [sample, *ours.generate([ids], PARAMS)]) <= TOLERANCE
        with torch.inference_mode():
            hidden_TE = model.model(torch.tensor([ids])).last_hidden_state[0]
        for pooling, expected_E in (("mean", hidden_TE.mean(dim=0)), ("last", hidden_TE[-1])):
            found = ours.embed(ids, pooling)  # type: ignore[arg-type]
            assert (torch.tensor(found) - expected_E).abs().max() <= TOLERANCE


# ---- bits of the CPU kernels ----------------------------------------------------------------------------------------


def test_bits_do_not_depend_on_batch_chunks_hits_and_threads(witness: Witness) -> None:
    directory, _ = witness
    prompts = [text(50 + i, 5 + 17 * i) for i in range(10)]
    alone = []
    for prompt in prompts:
        with engine(directory, num_threads=1) as ours:
            alone += ours.generate([prompt], PARAMS)
    expected = [(one.completion_tokens, one.logprobs) for one in alone]
    for budget, num_threads in ((2048, 2), (100, 1), (64, 2), (48, 1), (37, 2), (16, 1)):
        with engine(directory, max_tokens_per_batch=budget, num_threads=num_threads) as ours:
            for is_hit in (False, True):
                samples = ours.generate(prompts, PARAMS)
                assert all(one.num_cached_tokens > 0 for one in samples) == is_hit
                assert [(one.completion_tokens, one.logprobs) for one in samples] == expected, (budget, is_hit)


def test_bits_do_not_depend_on_drafts_and_preemption(witness: Witness) -> None:
    directory, _ = witness
    short, length = tight(directory, max_tokens_per_batch=64, speculation="ngram")
    params = replace(PARAMS, max_tokens=length - 25, logit_bias={5: 30.0, 9: 30.0})
    prompts = [text(seed, 5) * 4 for seed in range(4)]
    with engine(directory) as plain, engine(directory, speculation="ngram") as drafting, short:
        expected = [(one.completion_tokens, one.logprobs) for one in plain.generate(prompts, params)]
        samples = short.generate(prompts, params)
        drafted, stats = run_all(drafting, [EngineRequest(prompt=one, params=params) for one in prompts])
        assert [(one.completion_tokens, one.logprobs) for one in drafted] == expected
        assert [(one.completion_tokens, one.logprobs) for one in samples] == expected
        assert sum(one.num_preemptions for one in samples)
        assert 0 < sum(one.num_accepted for one in stats) < sum(one.num_drafted for one in stats)
