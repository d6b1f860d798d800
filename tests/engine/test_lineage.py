"""Samples name whose weight versions they count, so that unrelated numbers are never merged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nano_inference import BadRequest, InferenceEngine, SamplingParams, TrainingSample, run_rollouts
from nano_inference.rl.rollout import Rollout, extend, start
from tests.sim.fakes import fake_engine
from tests.weights.pairs import OpenEngine, Pair

PROMPT = [5, 9, 30, 2, 44]
PARAMS = SamplingParams(max_tokens=16, seed=4, ignore_eos=True)


def interrupted(engine: InferenceEngine, steps: int = 5) -> TrainingSample:
    request = engine.add_request(PROMPT, PARAMS)
    for _ in range(steps):
        engine.step()
    return engine.abort(request)[0]


def test_samples_have_their_engines_lineage() -> None:
    one, two = fake_engine(), fake_engine()
    assert len({one.lineage, two.lineage, fake_engine().lineage}) == 3 and len(one.lineage) >= 16
    assert {sample.lineage for sample in one.generate([PROMPT], PARAMS, 3)} == {one.lineage}
    assert interrupted(two).lineage == two.lineage
    assert interrupted(two, 0).lineage == two.lineage
    assert [delta.sample for delta in one.stream(PROMPT, PARAMS)][-1].lineage == one.lineage  # type: ignore[union-attr]


def test_lineage_has_at_most_128_characters() -> None:
    assert fake_engine(lineage="x" * 128).lineage == "x" * 128
    with pytest.raises(BadRequest, match="lineage must be a string of 1 to 128 characters"):
        fake_engine(lineage="x" * 129)


def test_resume_in_another_engine_raises_naming_both_lineages() -> None:
    one, two = fake_engine(), fake_engine()
    partial = interrupted(one)
    assert partial.completion_tokens
    with pytest.raises(BadRequest, match="partial: its lineage is") as caught:
        two.add_request(PROMPT, PARAMS, partial=partial)
    assert all(part in str(caught.value) for part in (one.lineage, two.lineage, "EngineConfig.lineage"))
    with pytest.raises(BadRequest, match=r"samples\[1\]: partial: its lineage is"):
        two.complete([two.generate([PROMPT], PARAMS)[0], partial], PARAMS)
    assert not two.has_pending()
    assert one.complete([partial], PARAMS)[0].completion_tokens == one.generate([PROMPT], PARAMS)[0].completion_tokens


def test_engines_with_equal_lineage_resume_each_others_samples() -> None:
    one, two = fake_engine(lineage="pool-7"), fake_engine(lineage="pool-7")
    assert one.lineage == two.lineage == "pool-7"
    done = two.complete([interrupted(one)], PARAMS)[0]
    assert (done.lineage, done.completion_tokens) == ("pool-7", one.generate([PROMPT], PARAMS)[0].completion_tokens)


def test_sample_of_a_later_version_is_refused(untied: Pair, open_engine: OpenEngine) -> None:
    one, two = open_engine(untied, lineage="run"), open_engine(untied, lineage="run")
    for _ in range(3):
        one.update_weights(untied.named(), blocking=True)
    two.update_weights(untied.named(), blocking=True)
    partial = interrupted(one)
    with pytest.raises(BadRequest, match=r"samples\[0\]: partial: has tokens of weight version 3, this engine's is 1"):
        two.complete([partial], PARAMS)
    assert set(one.complete([interrupted(two)], PARAMS)[0].token_versions) == {1, 3}


def test_a_sample_without_tokens_or_without_a_lineage_is_accepted() -> None:
    one, two = fake_engine(), fake_engine()
    empty = interrupted(one, 0)
    assert not empty.completion_tokens
    assert two.complete([empty], PARAMS)[0].lineage == two.lineage
    data = interrupted(one).to_dict()
    del data["lineage"]  # a file of an earlier release
    old = TrainingSample.from_dict(json.loads(json.dumps(data)))
    assert old.lineage is None
    assert two.complete([old], PARAMS)[0].lineage == two.lineage


def test_a_lineage_survives_json_and_must_be_text() -> None:
    sample = interrupted(fake_engine(lineage="a"))
    assert TrainingSample.from_dict(json.loads(json.dumps(sample.to_dict()))).lineage == "a"
    assert replace(sample, lineage="b") == sample
    with pytest.raises(ValueError, match="lineage must be a string"):
        TrainingSample.from_dict(sample.to_dict() | {"lineage": 1})


def test_lineage_survives_updates_and_sleep_and_differs_in_copies(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied, lineage="pool")
    first = interrupted(engine)
    engine.sleep()
    engine.wake()
    engine.update_weights(untied.named(), blocking=True)
    whole = engine.complete([first], PARAMS)[0]
    assert (engine.lineage, whole.lineage) == ("pool", "pool")
    assert set(whole.token_versions) == {0, 1}
    with engine.copy() as copy, engine.copy() as other:
        assert len({engine.lineage, copy.lineage, other.lineage}) == 3
        with pytest.raises(BadRequest, match="partial: its lineage is 'pool'"):
            copy.add_request(PROMPT, PARAMS, partial=first)


def test_rollouts_have_one_lineage() -> None:
    one, two = fake_engine(), fake_engine()
    answers = iter([(7, 8), None])
    (rollout,) = run_rollouts(one, [PROMPT], lambda _: next(answers), PARAMS, max_turns=3)
    assert rollout.lineage == one.lineage and len(rollout.turns) == 2
    assert start(PROMPT).lineage is None
    assert Rollout.from_dict(json.loads(json.dumps(rollout.to_dict()))).lineage == one.lineage
    turn = two.generate([list(rollout.tokens)], PARAMS)[0]
    with pytest.raises(ValueError, match="turns: their samples have the lineages") as caught:
        extend(rollout, turn)
    assert one.lineage in str(caught.value) and two.lineage in str(caught.value)
    assert extend(rollout, replace(turn, lineage=None)).lineage == one.lineage
    data = rollout.to_dict()
    data["turns"][1]["sample"]["lineage"] = two.lineage
    with pytest.raises(ValueError, match="turns: their samples have the lineages"):
        Rollout.from_dict(data)
