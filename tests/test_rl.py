"""Acceptance: log-probabilities are the trainer's, and no K/V of old weights remains.

Models are tiny and random, with Transformers as the trainer.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.types import StepResult
from tests.models.families import VOCAB_SIZE, reference_logprobs
from tests.weights.pairs import OpenEngine, Pair

Model = transformers.PreTrainedModel
TOLERANCE = 1e-4
"""Largest difference in nats from the trainer, in float32."""
BF16_RMS = 0.04
"""Root mean square of the differences in nats, the engine in bfloat16 (Fast-LLM#525)."""
CACHES = ("radix", "paged")


def text(seed: int, length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


PROMPT = text(1, 11, 50)
LONG = SamplingParams(max_tokens=24, seed=4, ignore_eos=True)


@pytest.fixture(params=["tied", "untied"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Either architecture: tied embeddings, or a head of its own."""
    found: Pair = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def renewed(untied: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The new weights as a checkpoint: an engine opened on it has never seen the old ones."""
    directory = tmp_path_factory.mktemp("renewed")
    untied.new.save_pretrained(directory)
    return Pair(directory, untied.new, untied.old)


def tight(blocks: int, block_size: int = 4) -> dict[str, int]:
    """Options that make the tiny models' cache hold so many blocks."""
    return {"kv_cache_bytes": blocks * block_size * BYTES_PER_TOKEN, "block_size": block_size}


BYTES_PER_TOKEN = 4 * 2 * 2 * 12 * 4
"""Of the untied pair's K/V: four layers, keys and values, two heads of twelve, float32."""


def teacher(model: Model, sample: TrainingSample, temperature: float = 1.0) -> torch.Tensor:
    """The trainer's log-probabilities of a completion, teacher-forced, at a temperature."""
    table = reference_logprobs(model, [*sample.prompt_tokens, *sample.completion_tokens])
    table = torch.log_softmax(table[-len(sample.completion_tokens) :] / temperature, dim=-1)
    return table.gather(-1, torch.tensor(sample.completion_tokens).unsqueeze(-1)).squeeze(-1)


def differences(model: Model, sample: TrainingSample, temperature: float, part: slice = slice(None)) -> torch.Tensor:
    """The engine's log-probabilities less the trainer's: those drawn from, then the model's own, where reported."""
    found = (torch.tensor(sample.logprobs) - teacher(model, sample, temperature))[part]
    if sample.raw_logprobs is None:
        return found
    return torch.cat([found, (torch.tensor(sample.raw_logprobs) - teacher(model, sample))[part]])


def run_out(engine: InferenceEngine) -> list[TrainingSample]:
    """Run to the end; nothing may be left behind."""
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    engine.parts.kv.check()
    assert num_held(engine) == 0
    return samples


def num_held(engine: InferenceEngine) -> int:
    """Blocks with a reference."""
    return engine.parts.kv.num_blocks - engine.parts.kv.num_free_blocks()


def steps(engine: InferenceEngine, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


def tokens_of(samples: Sequence[TrainingSample]) -> list[tuple[int, ...]]:
    return [sample.completion_tokens for sample in samples]


# ---- a: log-probabilities are the trainer's

PROMPTS = [text(10, 33), text(11, 26), text(12, 45)]
Way = Callable[[InferenceEngine, SamplingParams], list[TrainingSample]]


def cold(engine: InferenceEngine, params: SamplingParams) -> list[TrainingSample]:
    samples = engine.generate(PROMPTS, params)
    assert not any(sample.num_cached_tokens for sample in samples)
    return samples


def on_a_hit(engine: InferenceEngine, params: SamplingParams) -> list[TrainingSample]:
    engine.generate([prompt[:21] for prompt in PROMPTS], replace(params, max_tokens=1))
    samples = engine.generate(PROMPTS, params)
    assert all(20 <= sample.num_cached_tokens <= 21 for sample in samples)
    return samples


def chunked(engine: InferenceEngine, params: SamplingParams) -> list[TrainingSample]:
    seen: list[StepResult] = []
    samples = engine.generate(PROMPTS, params, progress=seen.append)
    assert engine.config.max_tokens_per_batch == 7 == max(result.stats.num_computed for result in seen)
    return samples


def preempted(engine: InferenceEngine, params: SamplingParams) -> list[TrainingSample]:
    samples = engine.generate(PROMPTS, params)
    assert sum(sample.num_preemptions for sample in samples) > 0
    return samples


def forked(engine: InferenceEngine, params: SamplingParams) -> list[TrainingSample]:
    samples = engine.generate(PROMPTS[:1], params, 4)
    assert all(sample.num_cached_tokens >= 32 for sample in samples[1:])
    return samples


WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "cold": (cold, {}),
    "prefix hit": (on_a_hit, {}),
    "prefix hit by blocks": (on_a_hit, {"cache_type": "paged"}),
    "chunked": (chunked, {"max_tokens_per_batch": 7}),
    "preempted": (preempted, tight(24)),
    "forked": (forked, {}),
}


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_logprobs_are_the_trainers(way: str, temperature: float, pair: Pair, open_engine: OpenEngine) -> None:
    """Every token's log-probability is the trainer's teacher-forced one at the temperature it was drawn at (and the raw
    one the model's own), to 1e-4 in float32, however the engine came by its K/V."""
    run, options = WAYS[way]
    params = replace(LONG, temperature=temperature, raw_logprobs=True)
    for sample in run(open_engine(pair, **options), params):
        assert sample.logprobs_mode == "processed" and len(sample.logprobs) == 24
        assert float(differences(pair.old, sample, temperature).abs().max()) <= TOLERANCE
        assert float(differences(pair.new, sample, temperature).abs().max()) > 0.1, "the test would see other weights"


@pytest.mark.parametrize("way", ["cold", "preempted"])
def test_a_bfloat16_stays_near_the_trainer(way: str, untied: Pair, open_engine: OpenEngine) -> None:
    """An engine that computes in bfloat16 is at most 0.04 nats (root mean square) from its trainer, in either dtype."""
    run, options = WAYS[way]
    options = {**options, "dtype": "bfloat16"}
    samples = run(open_engine(untied, **options), replace(LONG, temperature=0.6, raw_logprobs=True))
    for dtype in (torch.float32, torch.bfloat16):
        trainer = copy.deepcopy(untied.old).to(dtype)
        off = torch.cat([differences(trainer, sample, 0.6) for sample in samples])
        assert 1e-4 < float(off.square().mean().sqrt()) <= BF16_RMS


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("temperature", [0, 0.6])
def test_a_raw_logprobs_are_the_models_own_whatever_is_drawn_from(
    temperature: float, kernels: str, untied: Pair, open_engine: OpenEngine
) -> None:
    options: list[dict[str, Any]] = [
        {"logit_bias": {3: 4.0, 9: -2.0}},
        {"allowed_token_ids": list(range(0, VOCAB_SIZE, 7))},
        {"repetition_penalty": 1.7, "presence_penalty": 0.9, "frequency_penalty": 0.3},
        {"min_tokens": 24, "stop_token_ids": list(range(0, VOCAB_SIZE, 2))},
        {"top_k": 4, "top_p": 0.7, "min_p": 0.1},
    ]
    params = [replace(LONG, temperature=temperature, logprobs_mode="raw", logprobs=3, **one) for one in options]
    for sample in open_engine(untied, kernels=kernels).generate([PROMPT] * len(params), params):
        table = reference_logprobs(untied.old, [*sample.prompt_tokens, *sample.completion_tokens])
        table = torch.log_softmax(table[-len(sample.completion_tokens) :], dim=-1)
        assert sample.logprobs == pytest.approx(teacher(untied.old, sample).tolist(), abs=TOLERANCE)
        assert sample.top_logprobs is not None
        for top, row in zip(sample.top_logprobs, table, strict=True):
            assert [one.logprob for one in top] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


def test_a_scores_are_the_trainers(pair: Pair, open_engine: OpenEngine) -> None:
    """Scoring a given text gives the trainer's teacher-forced log-probabilities: whole, in chunks, behind a hit, and
    under the weights of now."""
    engine = open_engine(pair, max_tokens_per_batch=19)
    ids, temperature = text(20, 70), 0.6

    def expected(model: Model) -> list[float]:
        table = torch.log_softmax(reference_logprobs(model, ids) / temperature, dim=-1)
        return table.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()

    for start in (0, 50):
        found = engine.score(ids, start, temperature=temperature)
        assert found == pytest.approx(expected(pair.old)[max(0, start - 1) :], abs=TOLERANCE)
    engine.update_weights(pair.named(), blocking=True)
    assert engine.score(ids, temperature=temperature) == pytest.approx(expected(pair.new), abs=TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_batch": 7}, tight(24)], ids=["roomy", "chunked", "tight"])
def test_a_logprobs_across_an_update_in_flight(options: dict[str, Any], untied: Pair, open_engine: OpenEngine) -> None:
    """Tokens drawn before an update in flight have the old trainer's log-probabilities; those drawn after it, with all
    K/V computed again, the new one's."""
    engine, temperature = open_engine(untied, **options), 0.6
    params = replace(LONG, temperature=temperature, raw_logprobs=True)
    for prompt in PROMPTS:
        engine.add_request(prompt, params)
    steps(engine, 18 if options else 6)
    engine.update_weights(untied.named(), on_running="recompute")
    engine.finish_update()
    num_old = 0
    for sample in run_out(engine):
        border = sample.token_versions.index(1)
        num_old += border
        assert sample.token_versions == (0,) * border + (1,) * (24 - border)
        for model, part in ((untied.old, slice(0, border)), (untied.new, slice(border, None))):
            assert not border or float(differences(model, sample, temperature, part).abs().max()) <= TOLERANCE
    assert num_old >= 6


Named = dict[str, torch.Tensor]


# ---- e: no stale K/V


@pytest.mark.parametrize("cache_type", CACHES)
def test_e_a_prompt_cached_before_an_update_runs_as_cold(
    cache_type: str, untied: Pair, renewed: Pair, open_engine: OpenEngine
) -> None:
    """A prompt whose K/V the old weights computed gives, after the update, exactly what an engine gives that was opened
    on the new weights: the same tokens, the same bits."""
    engine = open_engine(untied, cache_type=cache_type)
    engine.generate([PROMPTS[0]], LONG)
    assert engine.generate([PROMPTS[0]], LONG)[0].num_cached_tokens == 32, "it was cached indeed"
    engine.update_weights(untied.named())
    engine.finish_update()
    fresh = open_engine(renewed, cache_type=cache_type)
    for num_cached in (0, 32):
        after, expected = (one.generate([PROMPTS[0]], LONG)[0] for one in (engine, fresh))
        assert after.num_cached_tokens == expected.num_cached_tokens == num_cached
        assert after.completion_tokens == expected.completion_tokens
        assert after.logprobs == expected.logprobs
    assert tokens_of(engine.generate([PROMPTS[0]], LONG)) != tokens_of(open_engine(untied).generate([PROMPTS[0]], LONG))


def update_recomputing(engine: InferenceEngine, named: Named) -> None:
    engine.update_weights(named, on_running="recompute")
    engine.finish_update()


def update_blocking(engine: InferenceEngine, named: Named) -> None:
    engine.update_weights(named, blocking=True)


def pause_keep_clear(engine: InferenceEngine, named: Named) -> None:
    engine.pause("keep", clear_cache=True)
    engine.update_weights(named, blocking=True, on_running="keep")
    assert engine.step() == []
    engine.resume()


def update_then_clear(engine: InferenceEngine, named: Named) -> None:
    engine.update_weights(named)
    engine.finish_update()
    engine.pause("keep", clear_cache=True)
    engine.resume()


def sleep_discarding(engine: InferenceEngine, named: Named) -> None:
    engine.sleep(discard_weights=True)
    engine.update_weights(named, blocking=True)
    engine.wake()


CLEARING = (update_recomputing, update_blocking, pause_keep_clear, update_then_clear, sleep_discarding)


@pytest.mark.parametrize("num_drawn", [1, 9])
@pytest.mark.parametrize("change", CLEARING, ids=lambda change: change.__name__)
def test_e_a_suffix_after_keep_and_clear_is_the_new_models(
    change: Callable[[InferenceEngine, Named], None],
    num_drawn: int,
    untied: Pair,
    renewed: Pair,
    open_engine: OpenEngine,
) -> None:
    """When weights change in mid-flight and the K/V is cleared, what follows is exactly what the new model gives after
    prompt and prefix: same draws, same log-probabilities, one border between the versions."""
    engine = open_engine(untied)
    engine.add_request(PROMPT, LONG)
    steps(engine, num_drawn)
    change(engine, untied.named())
    sample = run_out(engine)[0]
    before = open_engine(untied).generate([PROMPT], LONG)[0]
    prefix = before.completion_tokens[:num_drawn]
    rest = replace(LONG, max_tokens=24 - num_drawn)
    after = open_engine(renewed).generate([[*PROMPT, *prefix]], rest)[0]
    assert sample.completion_tokens == prefix + after.completion_tokens
    assert sample.logprobs == before.logprobs[:num_drawn] + after.logprobs
    assert [span[:3] for span in sample.version_spans] == [(0, 0, num_drawn), (1, num_drawn, 24)]
    assert sample.num_preemptions == 1 and sample.weight_version == 0


@torch.inference_mode()
def mixed_logprobs(models: tuple[Model, Model], ids: list[int], num_old: int) -> torch.Tensor:
    """Log-probabilities [tokens - 1, V] when one model computed the first positions' K/V, another the rest over it."""
    cache = transformers.DynamicCache()
    parts = (models[0], ids[:num_old]), (models[1], ids[num_old:])
    logits = [model(torch.tensor([part]), cache=cache, use_cache=True).logits[0] for model, part in parts]
    return torch.log_softmax(torch.cat(logits).float(), dim=-1)[:-1]


@pytest.mark.parametrize("num_drawn", [1, 4, 22])
def test_e_keep_marks_the_border_to_the_token(num_drawn: int, untied: Pair, open_engine: OpenEngine) -> None:
    """When running requests keep their K/V, nothing is computed again, the version changes with the very token that the
    new weights drew, and each log-probability is of the distribution drawn from, old K/V included."""
    engine = open_engine(untied)
    prompts = [PROMPTS[0], PROMPT]
    engine.add_request(prompts[0], LONG, 2)
    steps(engine, 1)
    engine.add_request(prompts[1], LONG)
    steps(engine, num_drawn)
    drawn = {(0, 0): num_drawn + 1, (0, 1): num_drawn, (1, 0): num_drawn}
    engine.update_weights(untied.named(), version="new")
    assert engine.finish_update() == 1
    result = engine.tick()
    assert result.stats.num_computed == 3, "each computed one token, and nothing again"
    assert all(delta.versions == (1,) for delta in result.deltas) and len(result.deltas) == 3
    samples = run_out(engine)
    for sample in samples:
        border = drawn[sample.request_id, sample.sample_index]
        assert [tuple(span) for span in sample.version_spans] == [(0, 0, border, None), (1, border, 24, "new")]
        assert sample.token_versions == (0,) * border + (1,) * (24 - border)
        assert (sample.weight_version, sample.num_preemptions) == (0, 0)
        whole = [*sample.prompt_tokens, *sample.completion_tokens]
        num_old = len(sample.prompt_tokens) + border - 1  # the last drawn token had no K/V yet
        table = mixed_logprobs((untied.old, untied.new), whole, num_old)[-24:]
        expected = table.gather(-1, torch.tensor(sample.completion_tokens).unsqueeze(-1)).squeeze(-1)
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert len(samples) == 3
    assert engine.generate([PROMPTS[0]], LONG)[0].num_cached_tokens == 0, "mixed K/V is not shared"
