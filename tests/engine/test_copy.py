"""`InferenceEngine.copy`: a second engine with the weights of a moment, such as a reference model."""

from __future__ import annotations

import pytest

from nano_inference import BadRequest, EnginePaused, SamplingParams
from tests.models.families import gap
from tests.sim.fakes import fake_engine
from tests.weights.pairs import OpenEngine, Pair

PROMPTS = [[5, 9, 30, 2, 44], [7] * 21, [1]]
PARAMS = SamplingParams(max_tokens=15, seed=4, ignore_eos=True)


def test_samples_of_new_weights_are_scored_by_the_old(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    with engine.copy() as reference:
        engine.update_weights(untied.named(), blocking=True)
        assert (engine.get_weight_version(), reference.get_weight_version()) == (1, 0)
        for sample in engine.generate(PROMPTS, PARAMS, 2):
            ids = [*sample.prompt_tokens, *sample.completion_tokens]
            scores = reference.score(ids, len(sample.prompt_tokens))
            assert gap(untied.old, ids, scores) <= 1e-4  # type: ignore[arg-type]
            assert gap(untied.new, ids, list(sample.logprobs)) <= 1e-4


def test_copy_is_independent(tied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(tied)
    with pytest.warns(DeprecationWarning, match="is now InferenceEngine.copy"):
        copy = engine.twin(kv_cache_bytes=1 << 20)  # quoted
    assert copy.weights_checksum() == engine.weights_checksum()
    copy.update_weights(tied.named(), blocking=True)
    assert copy.weights_checksum() != engine.weights_checksum()
    copy.shutdown()
    assert engine.generate(PROMPTS, PARAMS)


def test_copy_rejects_engine_without_model(untied: Pair, open_engine: OpenEngine) -> None:
    with pytest.raises(BadRequest, match="has no model that can be copied"):
        fake_engine().copy()
    engine = open_engine(untied)
    with pytest.raises(BadRequest, match="kv_cache_bytes: 1 bytes do not hold one block"):
        engine.copy(kv_cache_bytes=1)
    engine.sleep(discard_weights=True)
    with pytest.raises(EnginePaused, match="discarded"):
        engine.copy()
