"""Pause, resume, sleep, wake, abort and flush: no lost requests, no leaks, no endless waits."""

from __future__ import annotations

import gc

import pytest
import torch

from nano_inference import BadRequest, EnginePaused, InferenceEngine, SamplingParams, TrainingSample
from tests.lines import counted_lines
from tests.sim.fakes import fake_engine, reference
from tests.weights.pairs import OpenEngine, Pair

LONG = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
PROMPT = [5, 9, 30, 2, 44]


def run_out(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    engine.parts.kv.check()
    return samples


def started(engine: InferenceEngine, steps: int = 5) -> int:
    request = engine.add_request(PROMPT, LONG, 2)
    for _ in range(steps):
        engine.step()
    return request


def is_right(samples: list[TrainingSample]) -> bool:
    return all(list(s.completion_tokens) == reference(PROMPT, LONG, s.sample_index)[0] for s in samples)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_pause_keep_suspends_all_requests(clear_cache: bool) -> None:
    engine = fake_engine()
    started(engine)
    computed = engine.parts.runner.num_computed
    for _ in range(2):
        engine.pause("keep", clear_cache=clear_cache)
        assert engine.is_paused and not engine.has_pending()
        assert engine.step() == [] and engine.tick().deltas == ()
    engine.add_request([1, 2], LONG)
    assert engine.step() == [] and engine.parts.runner.num_computed == computed
    held = engine.parts.kv.num_blocks - engine.parts.kv.num_free_blocks()
    assert (held == 0) == clear_cache
    for _ in range(2):
        engine.resume()
    samples = run_out(engine)
    assert len(samples) == 3 and is_right(samples[1:] if samples[0].request_id else samples[:2])
    assert any(s.num_preemptions for s in samples) == clear_cache


def test_pause_wait_finishes_started_requests_and_starts_none() -> None:
    engine = fake_engine(max_batch_size=2)
    first = started(engine)
    second = engine.add_request([1, 2], LONG)
    engine.pause("wait")
    done = engine.step()
    assert [s.request_id for s in done] == [first, first] and is_right(done) and not engine.has_pending()
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    engine.pause("wait")
    engine.resume()
    assert [s.request_id for s in run_out(engine)] == [second]
    started(engine)
    engine.pause("keep")
    engine.pause("wait")
    assert len(engine.step()) == 2 and engine.is_paused, "a paused engine can still be drained"


def test_pause_abort_returns_partial_samples() -> None:
    engine = fake_engine(max_batch_size=2)
    first = started(engine)
    second = engine.add_request([1, 2], LONG)
    engine.pause("abort")
    assert engine.has_pending()
    samples = engine.step()
    assert [s.request_id for s in samples] == [first, first, second] and not engine.has_pending()
    assert all(s.finish_reason == "abort" for s in samples)
    whole = reference(PROMPT, LONG, 0)[0]
    assert samples[0].completion_tokens == tuple(whole[: len(samples[0].completion_tokens)]) != ()
    assert len(samples[0].logprobs) == len(samples[0].completion_tokens)
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("was_paused", [False, True])
def test_nonblocking_pause_completes_in_ticks(clear_cache: bool, was_paused: bool) -> None:
    engine = fake_engine(max_batch_size=2)
    first = started(engine)
    if was_paused:
        engine.pause("keep")
    second = engine.add_request([1, 2], LONG)
    engine.pause("wait", clear_cache=clear_cache, blocking=False)
    assert engine.is_pausing and not engine.is_paused and engine.has_pending()
    done: list[TrainingSample] = []
    while engine.is_pausing:
        done += engine.step()
    assert [s.request_id for s in done] == [first, first] and is_right(done)
    assert engine.is_paused and not engine.has_pending()
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    assert (engine.flush_cache() == 0) == clear_cache
    engine.pause("wait", blocking=False)
    assert engine.is_paused and not engine.is_pausing, "there is nothing to wait for"
    engine.resume()
    assert [s.request_id for s in run_out(engine)] == [second]


@pytest.mark.parametrize("was_paused", [False, True])
def test_waiting_pause_can_be_cancelled(was_paused: bool) -> None:
    engine = fake_engine()
    started(engine)
    if was_paused:
        engine.pause("keep")
    engine.pause("wait", blocking=False)
    assert engine.cancel_pause() and not engine.cancel_pause()
    assert (engine.is_pausing, engine.is_paused) == (False, was_paused)
    engine.pause("wait", blocking=False)
    engine.resume()
    assert not engine.is_pausing and is_right(run_out(engine))


def test_new_pause_replaces_a_waiting_one() -> None:
    engine = fake_engine()
    started(engine)
    engine.pause("wait", blocking=False)
    engine.pause("keep")
    assert engine.is_paused and not engine.is_pausing and engine.step() == []
    engine.resume()
    engine.pause("wait", blocking=False)
    with pytest.raises(EnginePaused, match="is pausing"):
        engine.sleep()
    engine.pause("abort")
    assert engine.is_paused and {s.finish_reason for s in engine.step()} == {"abort"}
    engine.sleep()
    engine.resume()
    engine.add_request(PROMPT, LONG)
    engine.pause("wait", blocking=False)
    assert engine.is_paused, "a queued request has not started"
    engine.wake()
    engine.resume()
    assert is_right(run_out(engine))


def test_draining_an_engine_asleep_raises() -> None:
    engine = fake_engine()
    started(engine)
    engine.sleep()
    for blocking in (True, False):
        with pytest.raises(EnginePaused, match="started requests cannot end"):
            engine.pause("wait", blocking=blocking)
    engine.wake()
    assert is_right(run_out(engine))


def test_requests_end_with_their_last_deltas() -> None:
    engine = fake_engine(max_batch_size=2)
    first = started(engine)
    second = engine.add_request([1, 2], LONG)
    (only,) = engine.end_requests([second, 99])
    assert (only.request_id, only.token_ids, only.finish_reason) == (second, (), "abort")
    deltas = engine.end_requests()
    assert [(d.request_id, d.sample_index) for d in deltas] == [(first, 0), (first, 1)]
    samples = [d.sample for d in deltas if d.sample is not None]
    assert all(s.stop_reason is None and s.completion_tokens for s in samples)
    assert engine.end_requests() == () and engine.step() == [] and not engine.has_pending()


def test_weights_can_be_labelled_during_and_after_an_update(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    engine.label_weights("first")
    assert engine.weight_info().label == "first"
    with pytest.raises(BadRequest, match="no weight update is in progress"):
        engine.label_weights("next", are_next=True)
    with pytest.raises(BadRequest, match="version must be an integer or a string"):
        engine.label_weights(1.5)  # type: ignore[arg-type]
    gathered: list[str] = []
    engine.update_weights(untied.named(), on_gathered=lambda: gathered.append(engine.weight_info().update))
    engine.label_weights("second", are_next=True)
    assert engine.weight_info().label == "first"
    assert engine.finish_update() == 1 and engine.weight_info().label == "second"
    assert gathered == ["staged"]
    sample = engine.generate([PROMPT], LONG)[0]
    assert dict(sample.version_labels) == {1: "second"}
    assert engine.weights_dtype() == "float32" and not engine.is_on_cuda


@pytest.mark.parametrize("hold", ["pause", "sleep"])
def test_waiting_on_a_halted_engine_raises(hold: str) -> None:
    engine = fake_engine()
    stream = engine.stream(PROMPT, LONG)
    next(stream)
    getattr(engine, hold)()
    message = "call resume" if hold == "pause" else "call wake"
    for wait in (lambda: engine.generate([PROMPT], LONG), lambda: engine.score(PROMPT), lambda: next(stream)):
        with pytest.raises(EnginePaused, match=message):
            wait()
    engine.resume()
    engine.wake()
    assert is_right(engine.generate([PROMPT], LONG))
    run_out(engine)


def test_invalid_arguments_are_named() -> None:
    engine = fake_engine()
    with pytest.raises(BadRequest, match="mode must be one of keep, wait, abort, got 'stop'"):
        engine.pause("stop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clear_cache must be true or false"):
        engine.pause(clear_cache=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="discard_weights must be true or false"):
        engine.sleep(discard_weights=None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="no weights that can be updated"):
        engine.update_weights({})
    assert not engine.is_paused and not engine.is_asleep


def test_sleep_keeps_requests_and_frees_the_cache(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    undisturbed = engine.generate([PROMPT], LONG, 2)
    engine.flush_cache()
    started(engine)
    for _ in range(2):
        engine.sleep()
        assert engine.is_asleep and not engine.has_pending() and engine.step() == []
    assert engine.parts.executor.cache.num_bytes == 0
    gc.collect()
    for _ in range(2):
        engine.wake()
    samples = run_out(engine)
    assert [s.completion_tokens for s in samples] == [s.completion_tokens for s in undisturbed]
    for ours, theirs in zip(samples, undisturbed, strict=True):
        assert torch.tensor(ours.logprobs).sub(torch.tensor(theirs.logprobs)).abs().max() < 1e-5


def test_discarded_weights_must_be_replaced_before_steps_run(untied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    started(engine)
    engine.sleep(discard_weights=True)
    assert engine.parts.executor.weights.num_bytes == 0
    with pytest.raises(ValueError, match="the weights were discarded, so an update must contain all of them"):
        engine.update_weights({}, partial=True)
    with pytest.raises(ValueError, match="the weights were discarded"):
        engine.weights_checksum()
    engine.wake()
    assert not engine.has_pending()
    with pytest.raises(EnginePaused, match="call update_weights"):
        engine.generate([PROMPT])
    engine.update_weights(untied.named(), blocking=True)
    assert {s.token_versions[-1] for s in run_out(engine)} == {1}


def test_flush_frees_idle_blocks_now_and_held_ones_on_release() -> None:
    engine = fake_engine()
    engine.generate([[*range(20)]], LONG)
    started(engine)
    held = engine.parts.kv.num_blocks - engine.parts.kv.num_free_blocks()
    assert engine.flush_cache() > 0
    assert engine.parts.kv.num_blocks - engine.parts.kv.num_free_blocks() == held
    assert is_right(run_out(engine))
    again = engine.generate([[*range(20)]], LONG)[0]
    assert again.num_cached_tokens == 0


def test_all_requests_are_aborted_at_once() -> None:
    engine = fake_engine(max_batch_size=2)
    first = started(engine)
    second, third = (engine.add_request([1, 2], LONG) for _ in range(2))
    assert [s.request_id for s in engine.abort([first, third, first, 99])] == [first, first, third]
    assert {s.request_id for s in engine.abort_all()} == {second}
    assert engine.abort_all() == () and not engine.has_pending()


def test_progress_callback_can_pause_the_engine() -> None:
    engine = fake_engine()
    with pytest.raises(EnginePaused):
        engine.generate([PROMPT], LONG, progress=lambda _: engine.pause())
    engine.resume()
    assert run_out(engine) == []


def test_draining_step_does_not_scan_the_queue() -> None:
    """The cost depends on started requests, not on queued ones."""

    def lines_of_drain(num_queued: int) -> int:
        engine = fake_engine(max_batch_size=2)
        first = started(engine, steps=1)
        for _ in range(num_queued):
            engine.add_request(PROMPT, LONG)
        engine.pause("wait", blocking=False)
        samples = []
        with counted_lines() as lines:
            while not engine.is_paused:
                samples += engine.step()
        assert [sample.request_id for sample in samples] == [first, first]
        engine.resume()
        assert len(run_out(engine)) == num_queued
        return lines.count

    assert lines_of_drain(20) == lines_of_drain(60) > 100
