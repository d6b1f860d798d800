"""What a Ctrl-C, a bug or a hostile value in the midst of a change leaves behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from nano_inference import BadRequest, EngineDead, EnginePaused, InferenceEngine, SamplingParams, WeightError
from tests.sim.fakes import Failing, fake_config, fake_engine, fake_parts, raising
from tests.sim.versioned import new_weights, versioned_engine
from tests.weights.pairs import OpenEngine, Pair

PROMPT = [5, 9, 30, 2, 44]
LONG = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)


def versioned(max_batch_size: int = 8) -> InferenceEngine:
    return versioned_engine("radix", 60, 4, fake_config(max_batch_size))


def test_interrupted_drain_cancels_its_update() -> None:
    engine = versioned()
    engine.parts.runner.on_step = raising(KeyboardInterrupt(), 2)
    engine.add_request(PROMPT, LONG)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(new_weights(), blocking=True, on_running="wait")
    assert engine.weight_info() == (0, None, "idle")
    while engine.has_pending():
        samples = engine.step()
    assert set(samples[0].token_versions) == {0}


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_update_whose_thread_does_not_start_is_dropped(
    error: type[BaseException], is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if is_started:
            really_start(thread)
        raise error

    engine = versioned()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(error):
        engine.update_weights(new_weights())
    monkeypatch.undo()
    assert (engine.weight_info().update, engine.finish_update()) == ("idle", 0)
    with pytest.raises(BadRequest, match="no weight update"):
        engine.commit_update()
    engine.update_weights(new_weights())
    assert engine.finish_update() == 1
    engine.shutdown()


def test_prompt_preempted_while_it_is_scored_has_each_score_once() -> None:
    params, prompt = replace(LONG, prompt_logprobs=0), PROMPT * 3
    config, parts = fake_config(max_tokens_per_batch=6), fake_parts("paged", 60, 4)
    (expected,) = InferenceEngine(config, parts=parts).generate([prompt], params)
    engine = InferenceEngine(config, parts=fake_parts("paged", 60, 4))
    engine.parts.runner.on_step = raising(MemoryError(), 2)
    sample, aborted = engine.generate([prompt, PROMPT], params)
    assert (sample.num_preemptions, aborted.finish_reason) == (1, "abort")
    assert sample.prompt_logprobs == expected.prompt_logprobs
    assert sample.completion_tokens == expected.completion_tokens


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("num_aborted", [1, 2])
def test_another_sample_scores_the_prompt_after_the_first_ran_out_of_memory(num_aborted: int, cache: str) -> None:
    params, prompt = replace(LONG, prompt_logprobs=2), PROMPT * 3
    config = fake_config(max_tokens_per_batch=6)
    expected = InferenceEngine(config, parts=fake_parts(cache, 60, 4)).generate([prompt], params, 3)
    engine = InferenceEngine(config, parts=fake_parts(cache, 60, 4))

    def on_step(number: int) -> None:
        if number in (2, 4)[:num_aborted]:
            raise MemoryError

    engine.parts.runner.on_step = on_step
    samples = engine.generate([prompt], params, 3)
    assert [sample.finish_reason for sample in samples] == ["abort"] * num_aborted + ["length"] * (3 - num_aborted)
    for sample, other in zip(samples[num_aborted:], expected[num_aborted:], strict=True):
        assert sample.prompt_logprobs == other.prompt_logprobs and len(sample.prompt_logprobs or ()) == 14
        assert sample.prompt_top_logprobs == other.prompt_top_logprobs
        assert sample.completion_tokens == other.completion_tokens


def test_a_fault_after_a_step_ran_out_of_memory_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts("paged", 60, 4))
    engine.parts.runner.on_step = raising(MemoryError(), 2)
    monkeypatch.setattr(engine.cache, "release", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate([PROMPT], LONG)
    with pytest.raises(EngineDead, match="division"):
        engine.generate([PROMPT], LONG)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("how", ["pause", "update", "abort"])
def test_started_group_ends_together(how: str, batch_size: int) -> None:
    engine = versioned(batch_size)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, seed=4, ignore_eos=True), 4)
    samples = []
    while not samples:
        samples += engine.step()
    if how == "pause":
        engine.pause("wait")
    else:
        engine.update_weights(new_weights(), blocking=True, on_running="wait" if how == "update" else "abort")
    samples += engine.step()
    assert len(samples) == 4
    assert {version for sample in samples for version in sample.token_versions} == {0}


def test_waiting_with_discarded_weights_installs_at_once() -> None:
    engine = versioned()
    engine.add_request(PROMPT, LONG)
    engine.step()
    engine.sleep(discard_weights=True)
    engine.wake()
    assert engine.update_weights(new_weights(), blocking=True, on_running="wait") == 1
    while engine.has_pending():
        samples = engine.step()
    assert set(samples[0].token_versions) == {0, 1}


def test_source_that_exits_its_thread_fails_the_update(untied: Pair, open_engine: OpenEngine) -> None:
    def leaving() -> object:
        yield next(iter(untied.named().items()))
        raise SystemExit

    engine = open_engine(untied)
    engine.update_weights(leaving())  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="SystemExit"):
        engine.finish_update()


def test_sample_ended_by_its_program_is_returned_unchanged() -> None:
    engine = fake_engine()
    engine.add_request(PROMPT, LONG, program=Failing())
    while engine.has_pending():
        broken = engine.step()
    assert "vocabulary" in str(broken[0].stop_reason) and max(broken[0].completion_tokens) < 50
    assert engine.complete(broken, LONG) == broken


def test_staged_weights_end_the_wait_for_weights() -> None:
    engine = versioned()
    engine.sleep(discard_weights=True)
    engine.wake()
    with pytest.raises(EnginePaused, match="update_weights"):
        engine.generate([PROMPT], LONG)
    engine.update_weights(new_weights())
    assert engine.parts.weights is not None and engine.parts.weights.wait() == "staged"
    assert engine.generate([PROMPT], LONG)[0].weight_version == 1
