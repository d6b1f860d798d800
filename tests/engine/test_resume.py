"""Resuming an aborted sample; output is identical to an uninterrupted run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nano_inference import BadRequest, InferenceEngine, SamplingParams, TrainingSample
from tests.sim.fakes import Calculator, StopAfter, fake_engine
from tests.weights.pairs import OpenEngine, Pair

PROMPT = [5, 9, 30, 2, 44]
LONG = SamplingParams(max_tokens=24, seed=4, ignore_eos=True)


def interrupted(engine: InferenceEngine, params: SamplingParams, steps: int, count: int = 1) -> list[TrainingSample]:
    request = engine.add_request(PROMPT, params, count)
    for _ in range(steps):
        engine.step()
    return list(engine.abort(request))


def test_repeatedly_aborted_sample_is_identical(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    params = replace(LONG, temperature=0.9, top_k=20, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=9)
    params = replace(params, raw_logprobs=True, sampling_mask=True, logprobs=2)
    whole = engine.generate([PROMPT], params, 3)
    engine.flush_cache()
    parts = interrupted(engine, params, 5, 3)
    for step in (3, 8):
        for index, sample in enumerate(parts):
            request = engine.add_request(PROMPT, params, partial=sample)
            for _ in range(step):
                engine.step()
            parts[index] = engine.abort(request)[0]
            assert parts[index].completion_tokens == whole[index].completion_tokens[: len(parts[index].mask)]
    assert all(15 <= len(part.completion_tokens) <= 5 + 3 + 8 for part in parts)
    assert all(part.num_cached_tokens <= len(PROMPT) for part in parts), "the completion is not counted"
    for done, expected in zip(engine.complete(parts, params), whole, strict=True):
        assert done.completion_tokens == expected.completion_tokens and done.sampling_masks == expected.sampling_masks
        assert (done.sample_index, done.seed, done.finish_reason) == (expected.sample_index, 4, "length")
        for name in ("logprobs", "raw_logprobs"):
            ours, theirs = getattr(done, name), getattr(expected, name)
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_resumed_sample_keeps_its_random_seed() -> None:
    engine = fake_engine()
    params = replace(LONG, seed=None)
    parts = interrupted(engine, params, 6, 2)
    assert parts[0].seed is not None
    done = engine.complete(parts, params)
    assert [d.completion_tokens for d in done] == [
        d.completion_tokens for d in engine.generate([PROMPT], replace(params, seed=parts[0].seed), 2)
    ]


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_resume_restores_program_and_matcher(cache_type: str) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
        engine = fake_engine(cache_type)

        def run(partial: TrainingSample | None, steps: int, engine=engine, params=params) -> TrainingSample:
            request = engine.add_request(
                PROMPT, params, make_matcher=StopAfter, program=Calculator(), partial=partial, claim=True
            )
            while engine.has_pending() and steps != 0:
                engine.tick()
                steps -= 1
            return engine.collect(request)[0]

        whole, sample = run(None, -1), run(None, rng.randrange(1, 8))
        while sample.finish_reason == "abort":
            sample = run(sample, rng.randrange(1, 8))
        assert (sample.completion_tokens, sample.mask) == (whole.completion_tokens, whole.mask)
        assert (sample.finish_reason, sample.stop_reason) == (whole.finish_reason, whole.stop_reason)


def test_a_completed_sample_keeps_the_versions_of_its_parts(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied, lineage="pool")
    engine.update_weights(untied.named(), blocking=True, version="one")
    parts = interrupted(engine, LONG, 10)
    engine.update_weights(untied.old.named_parameters(), blocking=True)
    sample = engine.complete(parts, LONG)[0]
    assert [tuple(span) for span in sample.version_spans] == [(1, 0, 10, "one"), (2, 10, 24, None)]
    assert TrainingSample.from_dict(sample.to_dict()) == sample
    other = open_engine(untied, lineage="pool")
    other.update_weights(untied.named(), blocking=True)
    elsewhere = other.complete(parts, LONG)[0]
    assert elsewhere.version_spans[0].label == "one"


def test_resumed_sample_scores_only_its_prompt() -> None:
    engine = fake_engine()
    params = replace(LONG, prompt_logprobs=0)
    whole = engine.complete(interrupted(engine, params, 6), params)[0]
    assert whole.prompt_logprobs == engine.generate([PROMPT], params)[0].prompt_logprobs
    assert len(whole.prompt_logprobs or ()) == len(PROMPT) - 1


def test_complete_returns_finished_samples_unchanged() -> None:
    engine = fake_engine()
    ended = engine.generate([PROMPT], LONG)
    assert engine.complete(ended, LONG)[0] is ended[0]
    assert engine.complete([], LONG) == []


def test_a_sample_that_reached_its_length_can_be_made_longer() -> None:
    engine = fake_engine()
    short = engine.generate([PROMPT], replace(LONG, max_tokens=7))[0]
    engine.add_request(PROMPT, LONG, partial=short)
    while engine.has_pending():
        longer = engine.step()
    assert longer[0].completion_tokens == engine.generate([PROMPT], LONG)[0].completion_tokens


def test_resume_rejects_invalid_partial_naming_the_field() -> None:
    engine = fake_engine()
    part = interrupted(engine, LONG, 6)[0]
    ended = replace(part, finish_reason="stop")
    unforced = replace(part, completion_tokens=(1,) * 6, mask=(1, 0, 1, 1, 1, 1))
    cases = [
        ({"partial": {}}, "partial must be a TrainingSample, got dict"),
        ({"partial": ended}, "ended with a stop"),
        ({"partial": part, "num_samples": 2}, "num_samples must be 1"),
        ({"partial": replace(part, completion_tokens=(99,) * 6)}, "outside the vocabulary of 50"),
        ({"partial": replace(part, mask=(2,) * 6)}, "a mask that is not 0 or 1"),
        ({"partial": replace(part, logprobs=(float("nan"),) * 6)}, "not all finite"),
        ({"partial": part, "prompt": [1, 2]}, "its prompt_tokens differ from the prompt"),
        ({"partial": part, "sampling_params": replace(LONG, max_tokens=6)}, "has 6 tokens already, max_tokens is 6"),
        ({"partial": part, "sampling_params": replace(LONG, raw_logprobs=True)}, "has no raw_logprobs"),
        ({"partial": part, "sampling_params": replace(LONG, sampling_mask=True)}, "has no sampling_masks"),
        ({"partial": part, "sampling_params": replace(LONG, logprobs=1)}, "has no top_logprobs"),
        ({"partial": part, "sampling_params": replace(LONG, logprobs_mode="raw")}, "its logprobs are processed"),
        ({"partial": replace(part, completion_tokens=(3, 4, 4, 4, 4, 4)), "program": Calculator()}, "program forces"),
        ({"partial": unforced, "program": Calculator()}, "program forces"),
    ]
    for options, message in cases:
        with pytest.raises(BadRequest, match=message):
            engine.add_request(**({"prompt": PROMPT, "sampling_params": LONG} | options))
    assert not engine.has_pending()
