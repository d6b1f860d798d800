"""Every family compared with Transformers in float32: cold, on a prefix hit, chunked, preempted, greedy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams
from tests.models.families import FAMILIES, VOCAB_SIZE, gap, gap_to, make_model, others_nightly, reference_logprobs

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
TIE = 1e-5
"""Two logits of float32 that are closer than this have different orders on different processors."""
FLEX = ("llama-ratio1-untied", "qwen2-ratio7", "qwen2-yarn-window", "gemma2", "gemma3")
"""Families that differ in what the attention backend is given: heads per kv head, windows, softcap, scale."""
Witness = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=others_nightly(FAMILIES))
def witness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    directory = tmp_path_factory.mktemp("tiny")
    yield directory, make_model(request.param, directory)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def engine(directory: Path, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 64 << 20, "device": "cpu"} | options
    return InferenceEngine(EngineConfig(model_path=str(directory), **options))


def test_scores_match_with_odd_chunk_sizes(witness: Witness) -> None:
    directory, model = witness
    ids = text(1, 600)
    expected = reference_logprobs(model, ids)
    for budget, block_size in ((2048, 16), (37, 7), (100, 1)):
        scores = engine(directory, max_tokens_per_batch=budget, block_size=block_size).score(ids)
        assert len(scores) == 599
        assert gap_to(expected, ids, scores) <= TOLERANCE, (budget, block_size)


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
def test_scores_match_on_a_prefix_hit(witness: Witness, cache_type: str) -> None:
    directory, model = witness
    with engine(directory, cache_type=cache_type) as ours:
        ids = text(2, 600)
        ours.generate([ids[:555]], SamplingParams(max_tokens=1, seed=1))
        scores = ours.score(ids, start=540)
        assert len(scores) == 60
        assert gap(model, ids, scores) <= TOLERANCE
        sample = ours.generate([ids[:570]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))[0]
        assert sample.num_cached_tokens >= 528
        assert gap(model, [*ids[:570], *sample.completion_tokens], list(sample.logprobs)) <= TOLERANCE


def test_preempted_requests_match(witness: Witness) -> None:
    directory, model = witness
    prompts = [text(seed, 40 + 13 * seed) for seed in range(6)]
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    roomy = engine(directory).generate(prompts, params)
    parts = engine(directory).parts
    block_bytes = parts.checkpoint.config.kv_bytes_per_token(4) * 16
    tight = engine(directory, kv_cache_bytes=block_bytes * 14, max_tokens_per_batch=64).generate(prompts, params)
    assert sum(sample.num_preemptions for sample in tight) > 0
    for sample, unpressed in zip(tight, roomy, strict=True):
        assert sample.completion_tokens == unpressed.completion_tokens
        assert gap(model, [*sample.prompt_tokens, *sample.completion_tokens], list(sample.logprobs)) <= TOLERANCE


def test_greedy_tokens_match(witness: Witness) -> None:
    directory, model = witness
    prompts = [text(100 + seed, 3 + 5 * seed) for seed in range(20)]
    samples = engine(directory).generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    num_ties = 0
    for sample in samples:
        ids = [*sample.prompt_tokens, *sample.completion_tokens]
        best = reference_logprobs(model, ids, 64).topk(2, dim=-1)
        is_tie = best.values[:, 0] - best.values[:, 1] < TIE
        for token, pair, is_open in zip(sample.completion_tokens, best.indices.tolist(), is_tie.tolist(), strict=True):
            assert token in pair[: 1 + is_open]
        num_ties += int(is_tie.sum())
    assert num_ties <= 1, "these prompts decide too little"


@pytest.mark.parametrize("witness", FLEX, indirect=True)
def test_flex_attention_matches(witness: Witness) -> None:
    directory, model = witness
    ids = text(3, 90)
    with engine(directory, attention="flex", max_tokens_per_batch=50) as ours:
        assert gap(model, ids, ours.score(ids)) <= TOLERANCE
        samples = ours.generate([ids[:60], ids[:33]], SamplingParams(max_tokens=3, seed=2, ignore_eos=True))
        for sample in samples:
            assert gap(model, [*sample.prompt_tokens, *sample.completion_tokens], list(sample.logprobs)) <= TOLERANCE
