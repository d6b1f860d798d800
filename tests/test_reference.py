"""Scores under a second set of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nano_inference import BadRequest, EnginePaused, InferenceEngine, SamplingParams
from tests.models.families import gap
from tests.reference import with_ref_logprobs
from tests.sim.fakes import fake_config, fake_parts
from tests.weights.pairs import OpenEngine, Pair

PROMPTS = [[5, 9, 30, 2, 44], [7] * 21, [1]]
PARAMS = SamplingParams(max_tokens=15, seed=4, ignore_eos=True)


def test_samples_of_new_weights_are_scored_by_the_old(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    with engine.copy() as reference:
        engine.update_weights(untied.named(), blocking=True)
        assert (engine.get_weight_version(), reference.get_weight_version()) == (1, 0)
        samples = engine.generate(PROMPTS, PARAMS, 4)
        samples[0] = replace(samples[0], mask=(0, *samples[0].mask[1:]))
        computed: list[int] = []
        run = reference.parts.runner.run
        reference.parts.runner.run = lambda rows, copies, fresh: (
            computed.append(sum(len(r.tokens) for r in rows)),
            run(rows, copies, fresh),
        )[1]
        done = with_ref_logprobs(samples, reference)
        assert sum(computed) < sum(len(s.prompt_tokens) + 15 for s in samples) - 3 * 16, "prompts are scored once"
    for sample in done[1:]:
        assert sample.ref_logprobs is not None
        ids = [*sample.prompt_tokens, *sample.completion_tokens]
        assert gap(untied.old, ids, list(sample.ref_logprobs)) <= 1e-4
        assert gap(untied.new, ids, list(sample.logprobs)) <= 1e-4
    assert done[0].ref_logprobs is not None and done[0].ref_logprobs[0] == 0.0 > done[0].ref_logprobs[1]
    assert with_ref_logprobs([], engine) == []


def test_a_temperature_is_applied(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    params = replace(PARAMS, temperature=0.6)
    with engine.copy() as same:
        for sample in with_ref_logprobs(engine.generate(PROMPTS, params, 2), same, temperature=0.6):
            assert torch.tensor(sample.ref_logprobs).sub(torch.tensor(sample.logprobs)).abs().max() < 1e-5


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
        InferenceEngine(fake_config(), parts=fake_parts("radix", 10, 4)).copy()
    engine = open_engine(untied)
    with pytest.raises(BadRequest, match="kv_cache_bytes: 1 bytes do not hold one block"):
        engine.copy(kv_cache_bytes=1)
    engine.sleep(discard_weights=True)
    with pytest.raises(EnginePaused, match="discarded"):
        engine.copy()


@pytest.mark.parametrize("start", [-1, True, 1.5, [0], [0, -1], "0"])
def test_score_rejects_invalid_start(start: object, untied: Pair, open_engine: OpenEngine) -> None:
    with pytest.raises(BadRequest, match="start must be an integer"):
        open_engine(untied).score([[1, 2], [3, 4]], start)  # type: ignore[arg-type]


def test_each_text_may_have_its_own_start(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    whole = engine.score(PROMPTS)
    parts = engine.score(PROMPTS, [3, 0, 1])
    assert [len(part) for part in parts] == [2, 20, 0]  # type: ignore[arg-type]
    assert torch.allclose(torch.tensor(parts[0]), torch.tensor(whole[0][2:]), atol=1e-5)  # type: ignore[index]
