"""Acceptance: what reinforcement learning asks of the engine (criteria a to h), in process, on a CPU.

Models are tiny and random, with Transformers as the trainer; the fakes are those of `tests.sim`. K/V of several
versions at once is tested in `tests.test_mixed_weights`, pressure in `tests.sim`.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from nano_inference import InferenceEngine, SamplingParams, TrainingSample, WeightError, weights_checksum
from nano_inference.core.seeds import uniform
from nano_inference.types import StepResult
from tests.models.families import VOCAB_SIZE, gap, reference_logprobs
from tests.sim.fakes import fake_config, fake_parts
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
"""Short enough in ids for the fakes too."""
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


def fake(cache_type: str = "radix", num_blocks: int = 200, **options: Any) -> InferenceEngine:
    config = replace(fake_config(**options), seed=None)
    return InferenceEngine(config, parts=fake_parts(cache_type, num_blocks, 4))


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


def assert_same(ours: TrainingSample, theirs: TrainingSample, tolerance: float = 1e-5) -> None:
    """Tokens, mask and log-probabilities agree."""
    assert (ours.completion_tokens, ours.mask) == (theirs.completion_tokens, theirs.mask)
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)


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


@pytest.mark.parametrize("way", WAYS)
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


# ---- b: batch mates change nothing


def margin(model: Model, sample: TrainingSample) -> float:
    """How near a draw came to a border of the cumulated distribution, where a rounding would give another token.

    Along the way it is shown that each token is the one at its uniform. Untruncated samples only.
    """
    whole = [*sample.prompt_tokens, *sample.completion_tokens]
    cdf = torch.softmax(reference_logprobs(model, whole).double(), dim=-1).cumsum(-1)
    nearest = 1.0
    for position in range(len(sample.prompt_tokens), len(whole)):
        drawn_at = uniform(sample.seed or 0, sample.sample_index, position)
        row, token = cdf[position - 1], whole[position]
        low = float(row[token - 1]) if token else 0.0
        nearest = min(nearest, drawn_at - low, float(row[token]) - drawn_at)
    return nearest


def random_mates(rng: random.Random, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Fifteen requests of all kinds, some of them without a seed."""
    prompts = [text(rng.randrange(999), rng.randrange(1, 40), vocab_size) for _ in range(15)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.5, 1, 2]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1, 0.7]),
            presence_penalty=rng.choice([0, 0.5]),
            max_tokens=rng.randrange(1, 30),
            seed=rng.choice([None, None, rng.randrange(99)]),
            prompt_logprobs=rng.choice([None, None, 2]),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    assert any(one.seed is None for one in params) and any(one.seed is not None for one in params)
    return prompts, params


@pytest.mark.parametrize("cache_type", CACHES)
def test_b_mates_change_nothing(cache_type: str, pair: Pair, open_engine: OpenEngine) -> None:
    """A seeded request has identical tokens, and log-probabilities to 1e-4, alone and among fifteen others: in a
    batch, in small chunks, under preemption, and with mates that come one after the other."""
    rng, seed = random.Random(1), 1
    prompts, params = random_mates(rng, VOCAB_SIZE)
    for mine in (replace(LONG, seed=100 * seed + more) for more in range(9)):
        alone = open_engine(pair, cache_type=cache_type).generate([PROMPT], mine)[0]
        if margin(pair.old, alone) > 1e-5:  # otherwise a rounding would decide
            break
    for options in ({}, {"max_tokens_per_batch": 23}, tight(36)):
        engine = open_engine(pair, cache_type=cache_type, max_batch_size=16, **options)
        place = rng.randrange(16)
        among = engine.generate([*prompts[:place], PROMPT, *prompts[place:]], [*params[:place], mine, *params[place:]])
        assert_same(among[place], alone, TOLERANCE)
    engine = open_engine(pair, cache_type=cache_type)
    request = engine.add_request(PROMPT, mine, claim=True)
    for prompt, one in zip(prompts, params, strict=True):
        engine.add_request(prompt, one)
        engine.step()
    engine.wait_for_any([request])
    assert_same(engine.collect(request)[0], alone, TOLERANCE)


# ---- c: seeds and groups


@pytest.mark.parametrize("cache_type", CACHES)
def test_c_a_seeded_group_is_distinct_and_reproducible(cache_type: str, pair: Pair, open_engine: OpenEngine) -> None:
    """Eight samples of one seed are eight different ones, the same at every call, in every engine, and whatever the
    size of the group."""
    engine = open_engine(pair, cache_type=cache_type)
    first = engine.generate([PROMPT], LONG, 8)
    assert len(set(tokens_of(first))) == 8 and [sample.seed for sample in first] == [4] * 8
    assert min(margin(pair.old, sample) for sample in first) > 1e-6, "take another seed: a rounding would decide"
    assert tokens_of(engine.generate([PROMPT], LONG, 8)) == tokens_of(first), "now from the cache"
    assert tokens_of(engine.generate([PROMPT], LONG, 3)) == tokens_of(first[:3])
    other = open_engine(pair, max_tokens_per_batch=5, **tight(20))
    assert tokens_of(other.generate([PROMPT], LONG, 8)) == tokens_of(first)
    unseeded = [engine.generate([PROMPT], replace(LONG, seed=None), 3) for engine in (other, open_engine(pair))]
    assert len({*tokens_of(unseeded[0]), *tokens_of(unseeded[1])}) == 6, "two replicas draw different samples"
    assert unseeded[0][0].seed != unseeded[1][0].seed


# ---- d: updates

Named = dict[str, torch.Tensor]
LAST = "lm_head.weight"


def test_d_updates_change_the_checksum_and_raise_the_version(pair: Pair, open_engine: OpenEngine) -> None:
    """After an update the weights are the trainer's to the bit (the checksum says so), the version is one higher, and
    tokens say which they were drawn with."""
    engine = open_engine(pair)
    old, new = (weights_checksum(model.named_parameters()) for model in (pair.old, pair.new))
    assert old != new
    for version, (model, expected) in enumerate([(pair.new, new), (pair.old, old), (pair.new, new)], 1):
        blocking = version == 2
        assert engine.update_weights(model.named_parameters(), blocking=blocking, version=f"step {version}") == version
        assert engine.finish_update() == version == engine.get_weight_version()
        assert engine.weights_checksum() == expected
        sample = engine.generate([PROMPT], LONG)[0]
        assert [tuple(span) for span in sample.version_spans] == [(version, 0, 24, f"step {version}")]
        assert gap(model, [*PROMPT, *sample.completion_tokens], list(sample.logprobs)) <= TOLERANCE


def test_d_a_tied_head_follows_its_embedding(tied: Pair, open_engine: OpenEngine) -> None:
    """A trainer of tied weights sends no head: that is no missing name, and the head is new too. One that does send it
    sends the same; anything else is refused."""
    checksums = []
    for named in (tied.named(), tied.new.state_dict()):
        engine = open_engine(tied)
        assert (LAST in named) == (len(checksums) == 1)
        engine.update_weights(named, blocking=True)
        checksums.append(engine.weights_checksum())
        sample = engine.generate([PROMPT], LONG)[0]
        assert gap(tied.new, [*PROMPT, *sample.completion_tokens], list(sample.logprobs)) <= TOLERANCE
    assert checksums[0] == checksums[1] == weights_checksum(tied.new.named_parameters())
    engine = open_engine(tied)
    before = engine.weights_checksum()
    with pytest.raises(WeightError, match=r"lm_head\.weight: differs"):
        engine.update_weights({**tied.named(), LAST: tied.named()["model.embed_tokens.weight"] + 1}, blocking=True)
    assert engine.weights_checksum() == before and engine.get_weight_version() == 0


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


# ---- f: aborts


def whole_of(engine: InferenceEngine, count: int = 1, params: SamplingParams = LONG) -> list[TrainingSample]:
    """What an abort must be a beginning of; leaves nothing cached."""
    samples = engine.generate([PROMPT], params, count)
    engine.flush_cache()
    return samples


def assert_partial(partial: Sequence[TrainingSample], whole: Sequence[TrainingSample], sizes: Sequence[int]) -> None:
    """The aborted samples hold what there was: so many tokens, with all that belongs to them."""
    assert [sample.finish_reason for sample in partial] == ["abort"] * len(sizes)
    assert [len(sample.completion_tokens) for sample in partial] == list(sizes)
    for sample, full, size in zip(partial, whole, sizes, strict=True):
        assert (sample.prompt_tokens, sample.sample_index) == (full.prompt_tokens, full.sample_index)
        assert sample.completion_tokens == full.completion_tokens[:size]
        assert sample.logprobs == pytest.approx(full.logprobs[:size], abs=1e-5)
        assert (sample.mask, sample.token_versions) == ((1,) * size, (0,) * size)


Opener = Callable[..., InferenceEngine]


@pytest.fixture(params=["fakes", "radix"])
def make(request: pytest.FixtureRequest, untied: Pair, open_engine: OpenEngine) -> Opener:
    """Engines of one kind: on the fakes, or on a tiny model with either cache; `blocks` says how large that is."""

    def make_one(*, blocks: int = 200, **options: Any) -> InferenceEngine:
        if request.param == "fakes":
            return fake(num_blocks=blocks, **options)
        return open_engine(untied, cache_type=request.param, **tight(blocks), **options)

    return make_one


def ticks(engine: InferenceEngine, count: int) -> Counter[tuple[int, int]]:
    """Run so many steps, in which nothing ends; return how many tokens each sample got."""
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(count):
        result = engine.tick()
        assert not result.samples
        found.update({(delta.request_id, delta.sample_index): len(delta.token_ids) for delta in result.deltas})
    return found


def test_f_an_abort_of_a_group_some_of_which_run_wait_or_have_ended(make: Opener) -> None:
    """Of a group, those that run and those that wait are returned; those that have ended were returned before."""
    engine = make(max_batch_size=2)
    whole = whole_of(engine, 6)
    mine = engine.add_request(PROMPT, LONG, 6)
    ended: list[TrainingSample] = []
    while len(ended) < 2:
        ended += engine.step()
    got = ticks(engine, 7)
    partial = engine.abort(mine)
    assert num_held(engine) == 0 and not engine.has_pending()
    assert [sample.sample_index for sample in (*ended, *partial)] == [0, 1, 2, 3, 4, 5]
    assert len(set(got)) == 2, "two ran, two waited"
    sizes = [len(sample.completion_tokens) for sample in partial]
    assert_partial(partial, whole[2:], sizes)
    assert sizes[0] >= sizes[1] >= 6 and sizes[2:] == [0, 0]


def test_f_a_closed_stream_and_a_client_that_went_away(make: Opener) -> None:
    """Closing a stream, forgetting it, collecting a claimed request early and an exception in a blocking call are
    aborts too: the blocks are back before another step."""
    engine = make()
    whole = whole_of(engine, 2)
    for num_read in (0, 1, 9):
        stream = engine.stream(PROMPT, LONG, 2)
        for _ in range(num_read):
            next(stream)
        assert (num_held(engine) > 0) == (num_read > 0)
        stream.close()  # type: ignore[attr-defined]
        assert num_held(engine) == 0 and not engine.has_pending()
    forgotten = engine.stream(PROMPT, LONG, 2)
    next(forgotten)
    del forgotten
    assert num_held(engine) == 0 and not engine.has_pending()
    engine.flush_cache()
    request = engine.add_request(PROMPT, LONG, 2, claim=True)
    steps(engine, 9)
    assert num_held(engine) > 0
    partial = engine.collect(request)
    assert_partial(partial, whole, [9, 8])
    assert num_held(engine) == 0 and not engine.has_pending()

    def go_away(result: StepResult) -> None:
        if result.stats.num_running and result.stats.num_sampled == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT], LONG, 2, progress=go_away)
    assert num_held(engine) == 0 and not engine.has_pending()
    assert tokens_of(engine.generate([PROMPT], LONG, 2)) == tokens_of(whole)


# ---- g: resuming after an abort


def aborted_after(
    engine: InferenceEngine, num_steps: int, params: SamplingParams, count: int = 1, **options: Any
) -> list[TrainingSample]:
    """The partial samples after so many steps; what ended before comes as it is. Nothing stays cached."""
    request = engine.add_request(PROMPT, params, count, claim=True, **options)
    for _ in range(num_steps):
        engine.tick()
    samples = engine.collect(request)
    engine.flush_cache()
    return samples


def resumed(engine: InferenceEngine, sample: TrainingSample, params: SamplingParams, **options: Any) -> TrainingSample:
    """The whole sample."""
    assert sample.finish_reason == "abort"
    request = engine.add_request(list(sample.prompt_tokens), params, partial=sample, claim=True, **options)
    engine.wait_for_any([request])
    return engine.collect(request)[0]


def test_g_any_sample_of_a_group_can_be_resumed(make: Opener) -> None:
    """A resumed partial sample is identical to an uninterrupted run, whichever of a group it
    is, in another engine of its lineage too, and gives it back whole."""
    params = replace(LONG, temperature=0.8, raw_logprobs=True, logprobs=2, prompt_logprobs=0)
    engine = make(lineage="group")
    whole = whole_of(engine, 4, params)
    for num_steps in (0, 1, 2, 7, 23):
        for index, sample in enumerate(aborted_after(engine, num_steps, params, 4)):
            if sample.finish_reason != "abort":
                continue
            done = resumed(engine if index % 2 else make(lineage="group"), sample, params)
            assert_same(done, whole[index])
            assert (done.sample_index, done.finish_reason, done.seed) == (index, "length", 4)
            assert done.token_versions == whole[index].token_versions
            for name in ("raw_logprobs", "prompt_logprobs"):
                assert getattr(done, name) == pytest.approx(getattr(whole[index], name), abs=1e-5)
            assert done.top_logprobs is not None and len(done.top_logprobs) == 24


def test_g_an_aborting_update_and_a_resumption_are_exact(untied: Pair, open_engine: OpenEngine) -> None:
    """Abort, update, resume: the tokens before are the old model's, those after exactly the new one's, and the sample
    says where the border is."""
    engine = open_engine(untied)
    engine.add_request(PROMPT, LONG, 2)
    steps(engine, 9)
    engine.update_weights(untied.named(), on_running="abort", version="new")
    engine.finish_update()
    partial = engine.step()
    for sample, border in zip(partial, (9, 8), strict=True):
        done = resumed(engine, sample, LONG)
        assert [tuple(span) for span in done.version_spans] == [(0, 0, border, None), (1, border, 24, "new")]
        for model, part in ((untied.old, slice(0, border)), (untied.new, slice(border, None))):
            assert float(differences(model, done, 1.0, part).abs().max()) <= TOLERANCE


# ---- h: edges


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_h_prompts_around_block_borders(length: int, cache_type: str, untied: Pair, open_engine: OpenEngine) -> None:
    """Prompts of one token, and around one block and two: cold, from the cache, in groups, in chunks of a block, and
    with completions that end at a border."""
    prompt = text(length, length)
    for options in ({}, {"max_tokens_per_batch": 4}, tight(8)):
        engine = open_engine(untied, cache_type=cache_type, **options)
        for num_new in (1, 4, 5):
            params = replace(LONG, max_tokens=num_new, prompt_logprobs=0)
            first = engine.generate([prompt], params, 2)
            again = engine.generate([prompt], params, 2)
            assert engine.score(prompt) == pytest.approx(list(first[0].prompt_logprobs or ()), abs=1e-5)
            for one, other in zip(first, again, strict=True):
                assert_same(one, other)
                assert float(differences(untied.old, one, 1.0).abs().max()) <= TOLERANCE
                assert length == 1 or gap(untied.old, prompt, list(one.prompt_logprobs or ())) <= TOLERANCE


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model whose ids do not fit into a byte."""
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 + (1.0 if "norm" in name else 0.0))
    directory = tmp_path_factory.mktemp("wide")
    model.save_pretrained(directory)
    return Pair(directory, model, model)


@pytest.mark.parametrize("cache_type", CACHES)
def test_h_ids_that_do_not_fit_into_a_byte(cache_type: str, wide: Pair, open_engine: OpenEngine) -> None:
    """Ids of 256 and more are cached, found again, never taken for others, and forced by a program like any."""
    engine = open_engine(wide, cache_type=cache_type)
    prompt = [255, 256, 257, 511, 512, 768, 999, 0, 300, 556]
    params = replace(LONG, prompt_logprobs=0)
    first = engine.generate([prompt], params, 2)
    assert max(max(sample.completion_tokens) for sample in first) >= 256
    again = engine.generate([prompt], LONG, 2)
    assert again[0].num_cached_tokens >= 8 and tokens_of(again) == tokens_of(first)
    lower = [token % 256 for token in prompt]  # the same bytes, other ids
    assert engine.generate([lower], LONG)[0].num_cached_tokens <= (2 if cache_type == "radix" else 0)
    for sample in (*first, *again):
        assert float(differences(wide.old, sample, 1.0).abs().max()) <= TOLERANCE
    assert gap(wide.old, prompt, list(first[0].prompt_logprobs or ())) <= TOLERANCE


@pytest.mark.parametrize("cache_type", CACHES)
def test_h_no_new_tokens_scores_the_prompt(cache_type: str, pair: Pair, open_engine: OpenEngine) -> None:
    """`max_tokens=0` with prompt log-probabilities is a client's echo scoring: all of the prompt's, nothing drawn, cold
    and cached, in chunks and in groups."""
    for options in ({}, {"max_tokens_per_batch": 6}):
        engine = open_engine(pair, cache_type=cache_type, **options)
        params = SamplingParams(max_tokens=0, prompt_logprobs=3, temperature=0)
        for _ in range(2):
            for prompt in (*PROMPTS, [7], PROMPTS[0][:8]):
                for sample in engine.generate([prompt], params, 2):
                    assert (sample.completion_tokens, sample.logprobs, sample.finish_reason) == ((), (), "length")
                    assert len(sample.prompt_logprobs or ()) == len(prompt) - 1 == len(sample.prompt_top_logprobs or ())
                    if len(prompt) > 1:
                        assert gap(pair.old, prompt, list(sample.prompt_logprobs or ())) <= TOLERANCE
        assert num_held(engine) == 0 and not engine.has_pending()
