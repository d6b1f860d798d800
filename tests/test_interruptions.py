"""What a Ctrl-C, a bug or a hostile value in the midst of a change leaves behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from nano_inference import BadRequest, EngineDead, EnginePaused, InferenceEngine, SamplingParams, WeightError
from nano_inference.core.step import BlockCopy, Row, RowResult
from nano_inference.weights.gate import StepGate
from tests.sim.fakes import Failing, FakeRunner, fake_config, fake_parts
from tests.sim.versioned import VersionedRunner, new_weights, versioned_engine
from tests.weights.pairs import OpenEngine, Pair

PROMPT = [5, 9, 30, 2, 44]
LONG = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)


def versioned(max_batch_size: int = 8) -> InferenceEngine:
    return versioned_engine("radix", 60, 4, fake_config(max_batch_size))


class InterruptedStep(VersionedRunner):
    """Is interrupted in its second step."""

    num_steps = 0

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        self.num_steps += 1
        if self.num_steps == 2:
            raise KeyboardInterrupt
        return super().run(rows, copies, fresh)


def test_interrupted_drain_cancels_its_update() -> None:
    engine = versioned_engine("radix", 60, 4, fake_config(), make_runner=InterruptedStep)
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


class ShortOfMemory(FakeRunner):
    """Runs out of memory in its second step."""

    num_steps = 0

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        self.num_steps += 1
        if self.num_steps == 2:
            raise MemoryError
        return super().run(rows, copies, fresh)


def test_prompt_preempted_while_it_is_scored_has_each_score_once() -> None:
    params, prompt = replace(LONG, prompt_logprobs=0), PROMPT * 3
    config, parts = fake_config(max_tokens_per_batch=6), fake_parts("paged", 60, 4)
    (expected,) = InferenceEngine(config, parts=parts).generate([prompt], params)
    engine = InferenceEngine(config, parts=replace(fake_parts("paged", 60, 4), runner=ShortOfMemory(60, 4)))
    sample, aborted = engine.generate([prompt, PROMPT], params)
    assert (sample.num_preemptions, aborted.finish_reason) == (1, "abort")
    assert sample.prompt_logprobs == expected.prompt_logprobs
    assert sample.completion_tokens == expected.completion_tokens


def test_a_fault_after_a_step_ran_out_of_memory_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreleasable(fake_parts("paged", 60, 4).kv.__class__):  # type: ignore[misc]
        def release(self, blocks: list[int]) -> None:
            raise RuntimeError("the free list broke")

    parts = fake_parts("paged", 60, 4)
    engine = InferenceEngine(fake_config(), parts=replace(parts, runner=ShortOfMemory(60, 4)))
    parts.kv.__class__ = Unreleasable
    with pytest.raises(RuntimeError, match="the free list broke"):
        engine.generate([PROMPT], LONG)
    with pytest.raises(EngineDead, match="the free list broke"):
        engine.generate([PROMPT], LONG)


def test_interruption_before_the_first_step_is_short() -> None:
    gate = StepGate(100, clock=lambda: 1e6)
    gate.end_step()
    step = threading.Thread(target=gate.begin_step, daemon=True)
    step.start()
    step.join(60)
    assert not step.is_alive()


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


def test_staged_weights_end_the_wait_for_weights() -> None:
    engine = versioned()
    engine.sleep(discard_weights=True)
    engine.wake()
    with pytest.raises(EnginePaused, match="update_weights"):
        engine.generate([PROMPT], LONG)
    engine.update_weights(new_weights())
    assert engine.parts.weights is not None and engine.parts.weights.wait() == "staged"
    assert engine.generate([PROMPT], LONG)[0].weight_version == 1


def test_source_that_exits_its_thread_fails_the_update(untied: Pair, open_engine: OpenEngine) -> None:
    def leaving() -> object:
        yield next(iter(untied.named().items()))
        raise SystemExit

    engine = open_engine(untied)
    engine.update_weights(leaving())  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="SystemExit"):
        engine.finish_update()


def test_invalid_partial_sample_leaves_engine_unaffected() -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts("radix", 100, 4))
    request = engine.add_request(PROMPT, LONG)
    engine.step()
    part = engine.abort(request)[0]
    for changes, message in (
        ({"completion_tokens": (99,)}, "outside the vocabulary of 50"),
        ({"completion_tokens": (-1,)}, "completion_tokens"),
        ({"mask": (2,)}, "a mask that is not 0 or 1"),
        ({"logprobs": (float("nan"),)}, "not all finite"),
    ):
        with pytest.raises(BadRequest, match=message):
            engine.complete([replace(part, **changes)], LONG)
    assert len(engine.complete([part], LONG)[0].completion_tokens) == 20


def test_sample_ended_by_its_program_is_returned_unchanged() -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts("radix", 100, 4))
    engine.add_request(PROMPT, LONG, program=Failing())
    while engine.has_pending():
        broken = engine.step()
    assert "vocabulary" in str(broken[0].stop_reason) and max(broken[0].completion_tokens) < 50
    assert engine.complete(broken, LONG) == broken


def test_resumed_sample_scores_only_its_prompt(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    params = replace(LONG, prompt_logprobs=2)
    request = engine.add_request(PROMPT, params)
    for _ in range(6):
        engine.step()
    part = engine.abort(request)[0]
    whole = engine.complete([part], params)[0]
    assert len(whole.prompt_logprobs or ()) == len(whole.prompt_top_logprobs or ()) == len(PROMPT) - 1


@pytest.mark.parametrize("wrong", [{"on_running": ""}, {"timeout": -1}, {"blocking": 3}, {"checksum": 3}])
def test_invalid_update_raises_and_closed_engine_raises_engine_dead(wrong: dict[str, Any]) -> None:
    engine = versioned()
    with pytest.raises(BadRequest):
        engine.update_weights({}, **wrong)
    engine.shutdown()
    with pytest.raises(EngineDead):
        engine.update_weights({}, **wrong)
