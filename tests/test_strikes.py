"""An interrupt at any bytecode leaves an engine that works: no dead engine, no lost block, the same tokens after it."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from tests.effort import some
from tests.sim.fakes import Calculator, StopAfter, fake_config
from tests.sim.striker import Striker
from tests.sim.versioned import new_weights, versioned_engine
from tests.weights.pairs import OpenEngine, Pair

PROMPTS = [[5, 9, 30, 2, 44, 8, 1], [5, 9, 30, 2, 11], [3]]
PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, prompt_logprobs=0)
WAITING = [5, 9, 30, 1, 1]
FIRST = 120
"""Bytecodes between a call and an interrupt; most functions execute fewer, and the interrupt is in another one."""


def make_engine(cache_type: str) -> InferenceEngine:
    """An engine whose cache is small: its steps preempt, share and evict."""
    return versioned_engine(cache_type, 26, 4, replace(fake_config(), max_tokens_per_batch=16))


def generate(engine: InferenceEngine, version: int = 0) -> list[TrainingSample]:
    return engine.generate(PROMPTS, PARAMS, 2, program=Calculator())


def content(samples: list[TrainingSample]) -> list[tuple[object, ...]]:
    return [(s.completion_tokens, s.logprobs, s.mask, s.finish_reason, s.prompt_logprobs) for s in samples]


def run_to_end(engine: InferenceEngine) -> dict[int, TrainingSample]:
    samples: dict[int, TrainingSample] = {}
    while engine.has_pending():
        samples |= {sample.request_id: sample for sample in engine.step()}
    return samples


def assert_whole(engine: InferenceEngine, expected: list[tuple[object, ...]]) -> None:
    """The engine works, gives what a fresh one gives, and holds nothing afterwards."""
    assert engine.is_alive
    run_to_end(engine)
    assert content(generate(engine)) == expected
    assert not engine.has_pending()
    engine.parts.kv.check()
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks


def count_calls(work: Callable[[], object]) -> int:
    with Striker([], num_calls=sys.maxsize) as striker:
        work()
    return striker.num_seen


def strike(work: Callable[[], object], num_calls: int, gaps: list[int]) -> list[str]:
    """Run `work` with interrupts after so many calls and these numbers of bytecodes; return where they struck."""
    with Striker(gaps, num_calls=num_calls) as striker, contextlib.suppress(KeyboardInterrupt):
        work()
    return striker.struck


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
@pytest.mark.parametrize("num_strikes", [1, 2, 3])
def test_generate_interrupted_anywhere_leaves_an_engine_that_works(cache_type: str, num_strikes: int) -> None:
    fresh = make_engine(cache_type)
    expected = content(generate(fresh))
    length = count_calls(lambda: generate(fresh))
    alone = make_engine(cache_type).generate([WAITING], PARAMS)
    engine = make_engine(cache_type)
    rng = random.Random(f"{cache_type} {num_strikes}")
    struck: set[str] = set()
    for _ in range(some(100)):
        waiting = engine.add_request(WAITING, PARAMS)
        gaps = [rng.randrange(1, FIRST)] + [rng.choice((1, 9, 60, 400)) * rng.randrange(1, 10) for _ in range(3)]
        struck.update(strike(lambda: generate(engine), rng.randrange(length), gaps[:num_strikes]))
        samples = run_to_end(engine)
        assert content([samples[waiting]]) == content(alone)
        assert_whole(engine, expected)
    assert len(struck) > some(20) * num_strikes


def change_everything(engine: InferenceEngine) -> None:
    """Call every state-changing method except `generate`, on an engine with waiting and running requests."""
    engine.add_request(PROMPTS[0], PARAMS, 2, make_matcher=StopAfter)
    engine.step()
    stream = engine.stream(PROMPTS[1], PARAMS)
    next(stream)
    engine.pause(clear_cache=True)
    engine.resume()
    engine.update_weights(new_weights(), blocking=True, on_running="recompute")
    next(stream)
    engine.flush_cache()
    engine.sleep()
    engine.wake()
    engine.score(PROMPTS[0])
    engine.update_weights(new_weights())
    engine.finish_update()
    stream.close()
    engine.add_request(PROMPTS[2], PARAMS)
    engine.step()
    engine.update_weights(new_weights(), blocking=True, on_running="abort")
    engine.step()
    engine.pause("abort")
    engine.resume()
    engine.abort_all()


# An interrupt inside the finalizer of a stream is reported as unraisable; the engine must work all the same.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_strikes", [1, 2])
def test_commands_interrupted_anywhere_leave_an_engine_that_works(num_strikes: int) -> None:
    length = count_calls(lambda: change_everything(make_engine("radix")))
    engine = make_engine("radix")
    rng = random.Random(num_strikes)
    struck: set[str] = set()
    for _ in range(some(120)):
        gaps = [rng.randrange(1, FIRST), rng.choice((1, 9, 60, 400)) * rng.randrange(1, 10)]
        struck.update(strike(lambda: change_everything(engine), rng.randrange(length), gaps[:num_strikes]))
        engine.resume()
        engine.wake()
        engine.cancel_update()
        version = engine.get_weight_version()
        assert engine.parts.weights is not None and engine.parts.weights.version == version
        assert engine.parts.runner.version == version  # type: ignore[attr-defined]
        fresh = make_engine("radix")
        fresh.parts.runner.version = version  # type: ignore[attr-defined]
        assert_whole(engine, content(generate(fresh)))
    assert len(struck) > some(40)


@pytest.mark.parametrize("num_strikes", [1, 2])
@pytest.mark.parametrize("blocking", [False, True])
def test_update_interrupted_anywhere_is_in_progress_whole_or_not_at_all(blocking: bool, num_strikes: int) -> None:
    engine = make_engine("radix")
    engine.update_weights(new_weights(), blocking=True)  # fills caches, whose bytecodes do not return
    rng = random.Random(num_strikes)
    struck: list[str] = []
    for place in range(1, 9000, 29 if blocking else 1):
        waiting, version = engine.add_request(WAITING, PARAMS), engine.get_weight_version()
        engine.step()
        with Striker([place, rng.randrange(1, 60)][:num_strikes]) as striker, contextlib.suppress(KeyboardInterrupt):
            engine.update_weights(new_weights(), blocking=blocking, on_running="abort")
        if not striker.struck:
            break
        struck += striker.struck
        is_installed = engine.finish_update() > version
        assert engine.weight_info().update == "idle"
        assert bool(engine.end_requests([waiting])) != is_installed, "an installed update has its own on_running"
        if len(struck) % 50 == 0:
            engine.shutdown()
            engine = make_engine("radix")
    assert len(set(struck)) > 20


@pytest.mark.parametrize("num_strikes", [1, 2])
def test_stream_interrupted_anywhere_leaves_no_request(num_strikes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps the traceback, and so the stream
    engine = make_engine("radix")
    engine.stream(WAITING, PARAMS).close()
    rng = random.Random(num_strikes)
    for place in range(1, 9000, 7):
        stream = None
        with Striker([place, rng.randrange(1, 60)][:num_strikes]) as striker, contextlib.suppress(KeyboardInterrupt):
            stream = engine.stream(WAITING, PARAMS)
        if not striker.struck:
            break
        if stream is not None:
            stream.close()
        gc.collect()  # an exception that refers to a stream is part of a cycle
        engine.flush_cache()  # any call ends what an interrupted one left
        assert not engine.has_pending()
    assert place > 1000


@pytest.mark.parametrize("path", ["auto", "off"])
def test_a_model_interrupted_anywhere_gives_the_same_tokens_afterwards(
    path: str, tied: Pair, open_engine: OpenEngine
) -> None:
    engine = open_engine(tied, kernels=path)

    def ask() -> list[TrainingSample]:
        return engine.generate([[1, 2, 3, 4, 5, 6], [1, 2, 9]], SamplingParams(max_tokens=4, seed=1), 2)

    expected = content(ask())
    length = count_calls(ask)
    rng = random.Random(path)
    for _ in range(some(40)):
        strike(ask, rng.randrange(length), [rng.randrange(1, FIRST), rng.randrange(1, 300)])
        assert not torch.is_inference_mode_enabled()
        engine.parts.kv.flush()
        assert content(ask()) == expected
        assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
