"""Embeddings: Transformers' last hidden state, pooled, whatever happens to the prompt on its way through the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.nanochat.program import hf_name
from nano_inference.support.checks import float32, unit_vector
from nano_inference.types import Pooling
from tests.models.families import FAMILIES, VOCAB_SIZE, make_model
from tests.nanochat.tiny import VOCAB, base_meta, model_config, state_dict, write_checkpoint
from tests.sim.fakes import fake_engine
from tests.weights.pairs import Pair

TOLERANCE = 1e-4
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
CACHES = ("radix", "paged")
LENGTHS = (1, 2, 17, 64, 120, 333)
"""A single token, less than a block, a whole number of blocks, longer than every window."""
Witness = tuple[Path, transformers.PreTrainedModel]


def text(seed: int, length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def asking(pooling: Pooling) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=pooling)


def engine(directory: Path, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 8 << 20, "device": "cpu"} | options
    return InferenceEngine(EngineConfig(model_path=str(directory), **options))


def last_hidden(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    """Return Transformers' last hidden state, [T, E]."""
    with torch.inference_mode():
        hidden_TE: Tensor = model.model(torch.tensor([ids])).last_hidden_state[0]
    return hidden_TE.float()


def gap(model: transformers.PreTrainedModel, ids: list[int], pooling: str, found: Any) -> float:
    """The largest difference of an embedding's numbers from Transformers'."""
    return gap_to(last_hidden(model, ids), pooling, found)


def gap_to(hidden_TE: Tensor, pooling: str, found: Any) -> float:
    """The largest difference of an embedding's numbers from those of pooled hidden states."""
    wanted = hidden_TE.mean(0) if pooling == "mean" else hidden_TE[-1]
    assert len(found) == wanted.numel() and wanted.abs().max() > 0.1
    return float((wanted - torch.tensor(found)).abs().max())


def run_out(ours: InferenceEngine) -> dict[int, TrainingSample]:
    found = {}
    while ours.has_pending():
        found |= {sample.request_id: sample for sample in ours.step()}
    ours.parts.kv.check()
    assert ours.parts.kv.num_free_blocks() == ours.parts.kv.num_blocks
    return found


@pytest.fixture(scope="module", params=list(FAMILIES))
def witness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    directory = tmp_path_factory.mktemp("tiny")
    yield directory, make_model(request.param, directory)


RAGGED = [text(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def hidden_states(witness: Witness) -> list[Tensor]:
    """Transformers' last hidden states of `RAGGED`."""
    return [last_hidden(witness[1], ids) for ids in RAGGED]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"cache_type": "paged", "max_tokens_per_batch": 37, "block_size": 7}], ids=["plain", "in chunks"]
)
def test_ragged_texts_of_every_family(witness: Witness, hidden_states: list[Tensor], options: dict[str, Any]) -> None:
    with engine(witness[0], **options) as ours:
        for pooling in POOLINGS:
            ours.flush_cache()
            for hidden_TE, found in zip(hidden_states, ours.embed(RAGGED, pooling), strict=True):
                assert gap_to(hidden_TE, pooling, found) <= TOLERANCE, (pooling, len(hidden_TE))


def test_nanochat_g0_equals_transformers(tmp_path: Path) -> None:
    weights = state_dict("G0", model_config("G0"), pad=1)
    write_checkpoint(tmp_path, "G0", config=model_config("G0"), state=weights, meta=base_meta("G0"))
    config = transformers.NanoChatConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1.1920929e-07, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.NanoChatForCausalLM(config).eval().float()
    model.load_state_dict({hf_name(name): weight for name, weight in weights.items()})
    model.model.rotary_emb.register_forward_hook(lambda *call: tuple(t.bfloat16().float() for t in call[-1]))  # G0's
    with engine(tmp_path, max_tokens_per_batch=37, block_size=7) as ours:
        for pooling in POOLINGS:
            ids = text(1, 150, VOCAB)
            assert gap(model, ids, pooling, ours.embed(ids, pooling)) <= TOLERANCE


@pytest.fixture
def tiny(untied: Pair) -> Witness:
    return untied.directory, untied.old


@pytest.fixture
def newer(untied: Pair) -> transformers.PreTrainedModel:
    return untied.new


def tight(tiny: Witness, num_blocks: int, **options: Any) -> InferenceEngine:
    """An engine with that many blocks of four."""
    per_token = engine(tiny[0]).parts.checkpoint.config.kv_bytes_per_token(4)
    return engine(tiny[0], kv_cache_bytes=per_token * 4 * num_blocks, block_size=4, **options)


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_embedding_after_preemption_is_equal(tiny: Witness, cache_type: str, pooling: Pooling) -> None:
    ours = tight(tiny, 60, cache_type=cache_type, max_tokens_per_batch=8)
    decoding = SamplingParams(max_tokens=70, seed=1, ignore_eos=True)
    with engine(tiny[0]) as roomy:
        drawn = [one.completion_tokens for one in roomy.generate([text(s, 20) for s in range(3)], decoding)]
    others = [ours.add_request(text(seed, 20), decoding) for seed in range(3)]
    for _ in range(12):
        ours.step()
    asked = {ours.add_request(text(50 + n, n), asking(pooling)): text(50 + n, n) for n in (90, 30, 61, 120)}
    found = run_out(ours)
    assert sum(found[one].num_preemptions for one in asked) > 0
    assert [found[one].completion_tokens for one in others] == drawn
    for request_id, ids in asked.items():
        assert gap(tiny[1], ids, pooling, found[request_id].embedding) <= TOLERANCE


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("on_running", ["keep", "recompute", "wait"])
def test_weight_update_restarts_an_embedding(
    tiny: Witness, newer: transformers.PreTrainedModel, cache_type: str, pooling: Pooling, on_running: Any
) -> None:
    ours = engine(tiny[0], cache_type=cache_type, max_tokens_per_batch=32, block_size=4, max_batch_size=3)
    texts = [text(seed, length) for seed, length in enumerate((150, 120, 150, 40))]
    ids = [ours.add_request(one, asking(pooling)) for one in texts]
    found = {sample.request_id: sample for _ in range(3) for sample in ours.step()}
    assert not found, "all are under way or wait"
    ours.update_weights(newer.state_dict(), on_running=on_running)
    assert ours.finish_update() == 1
    found |= run_out(ours)
    for request_id, one in zip(ids, texts, strict=True):
        version = found[request_id].weight_version
        assert gap(newer if version else tiny[1], one, pooling, found[request_id].embedding) <= TOLERANCE
    assert found[ids[0]].weight_version == int(on_running != "wait")
    assert found[ids[3]].weight_version == 1
    assert found[ids[0]].num_preemptions == int(on_running != "wait")


def test_an_embedding_has_one_sample(tiny: Witness) -> None:
    with engine(tiny[0]) as ours:
        assert ours.limits.hidden_size == len(ours.embed([1])) == 48
        with pytest.raises(BadRequest, match="num_samples must be 1 with pooling, got 2"):
            ours.generate([[1, 2]], asking("mean"), 2)


def test_aborting_update_returns_no_partial_embedding(tiny: Witness, newer: transformers.PreTrainedModel) -> None:
    ours = engine(tiny[0], max_tokens_per_batch=32)
    for pooling in POOLINGS:
        request_id = ours.add_request(text(1, 90), asking(pooling))
        ours.step()
        ours.update_weights(newer.state_dict(), blocking=True, on_running="abort")
        sample = run_out(ours)[request_id]
        assert (sample.finish_reason, sample.embedding) == ("abort", None)
        request_id = ours.add_request(text(1, 90), asking(pooling))
        ours.step()
        (partial,) = ours.abort(request_id)
        assert (partial.finish_reason, partial.embedding, partial.stop_reason) == ("abort", None, None)


@pytest.mark.parametrize("cache_type", CACHES)
def test_only_last_pooling_uses_cached_prefixes(tiny: Witness, cache_type: str) -> None:
    directory, model = tiny
    with engine(directory, cache_type=cache_type) as ours:
        ids = text(5, 200)
        ours.generate([ids[:160]], SamplingParams(max_tokens=1, seed=1))
        found = {pooling: ours.generate([ids], asking(pooling))[0] for pooling in ("last", "mean", "last", "mean")}
        assert found["mean"].num_cached_tokens == 0
        assert found["last"].num_cached_tokens >= 192, "what the embedding itself published"
        for pooling in POOLINGS:
            assert gap(model, ids, pooling, found[pooling].embedding) <= TOLERANCE
        other = text(6, 100)
        ours.embed(other)
        assert ours.generate([[*other, 3]], SamplingParams(max_tokens=1))[0].num_cached_tokens >= 96


def test_equal_texts_do_not_wait_for_each_other(tiny: Witness) -> None:
    with engine(tiny[0]) as ours:
        for _ in range(3):
            ours.add_request(text(8, 77), asking("mean"))
        assert len(ours.tick().samples) == 3, "each computes its own K/V in any case"


def test_normalized_vectors_have_length_one(tiny: Witness) -> None:
    texts = [text(1, 30), text(2, 44)]
    with engine(tiny[0]) as ours:
        plain, unit = ours.embed(texts), ours.embed(texts, normalize=True)
    for one, normalized in zip(plain, unit, strict=True):
        length = math.hypot(*one)
        assert abs(length - 1) > 0.01 and math.hypot(*normalized) == pytest.approx(1, abs=1e-6)
        assert normalized == torch.tensor(normalized).tolist()
        assert normalized == pytest.approx([value / length for value in one], abs=1e-6)
    cosine = functional.cosine_similarity(*(torch.tensor(one) for one in plain), dim=0)
    assert sum(a * b for a, b in zip(*unit, strict=True)) == pytest.approx(float(cosine), abs=1e-5)
    assert unit_vector([0.0, 0.0]) == (0.0, 0.0) and unit_vector([3.0, 4.0]) == float32([0.6, 0.8])


def test_an_engine_of_another_precision_returns_float32(tiny: Witness) -> None:
    with engine(tiny[0], dtype="bfloat16", kernels="off") as ours:
        found = ours.embed(ids := text(3, 90))
    assert found == torch.tensor(found).tolist()
    assert 1e-4 < gap(tiny[1], ids, "mean", found) < 0.1


def test_nonfinite_hidden_states_raise(tiny: Witness, newer: transformers.PreTrainedModel) -> None:
    broken = {name: weight.clone() for name, weight in newer.state_dict().items()}
    broken["model.norm.weight"][3] = math.nan
    with engine(tiny[0]) as ours:
        ours.update_weights(broken, blocking=True, allow_nonfinite=True)
        for pooling in POOLINGS:
            with pytest.raises(ValueError, match=r"token_ids\[0\]: the prompt's hidden states are not finite"):
                ours.embed([[1, 2, 3], [4]], pooling)
        ours.update_weights(newer.state_dict(), blocking=True)
        assert gap(newer, [1, 2, 3], "mean", ours.embed([1, 2, 3])) <= TOLERANCE


def test_runner_without_hidden_states_raises() -> None:
    ours = fake_engine()
    for pooling in POOLINGS:
        sample = ours.generate([[1, 2, 3]], asking(pooling))[0]
        assert (sample.finish_reason, sample.stop_reason) == ("abort", "the runner reports no hidden states")
    assert len(ours.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].completion_tokens) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max", "max_tokens": 0}, "pooling must be one of mean, last, got 'max'"),
        ({"pooling": "mean"}, "max_tokens must be 0 with pooling, got 256"),
        ({"pooling": "mean", "max_tokens": 0, "logprobs": 0}, "logprobs must be left out with pooling, got 0"),
        ({"pooling": "mean", "max_tokens": 0, "prompt_logprobs": 2}, "prompt_logprobs must be left out with pooling"),
    ],
)
def test_pooling_rejects_incompatible_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("text", {}, "token_ids must be a list of token ids"),
        ([[]], {}, "prompt must hold at least one token"),
        ([[1], [2, VOCAB_SIZE]], {}, f"token id {VOCAB_SIZE} at position 1 is outside the vocabulary"),
        ([1.5], {}, "prompt must be a collection of token ids"),
        ([1] * 1025, {}, "prompt has 1025 tokens; max_model_len is 1024"),
        ([1], {"pooling": "cls"}, "pooling must be one of mean, last, got 'cls'"),
        ([1], {"normalize": 1}, "normalize must be true or false"),
    ],
)
def test_embed_rejects_invalid_input(tiny: Witness, given: Any, options: dict[str, Any], message: str) -> None:
    with engine(tiny[0]) as ours:
        with pytest.raises(ValueError, match=message):
            ours.embed(given, **options)
        assert not ours.has_pending()
