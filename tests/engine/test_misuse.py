"""Calls from a second thread or from inside a step are refused; faulty programs and matchers end their own sample."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from nano_inference import BadRequest, EngineBusy, EngineConfig, InferenceEngine, SamplingParams
from tests.sim.fakes import VOCAB_SIZE, fake_engine, is_idle
from tests.sim.versioned import content, run_to_end
from tests.weights.pairs import OpenEngine, Pair

PROMPT = [5, 9, 30, 2, 44]
PARAMS = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
ALL_BITS = b"\xff" * -(-VOCAB_SIZE // 8)


class Hold:
    """An `OnStep` that waits in the first step until released."""

    def __init__(self) -> None:
        self.is_inside, self.may_leave = threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        self.is_inside.set()
        self.may_leave.wait()


def test_engine_takes_a_path_and_names_what_else_it_got(untied: Pair) -> None:
    for path in (untied.directory, str(untied.directory)):
        with InferenceEngine(path) as engine:
            assert engine.config == EngineConfig(str(untied.directory))
    for wrong in (None, 3, {"model_path": "default"}, ["default"]):
        with pytest.raises(BadRequest, match=f"EngineConfig or a model's path, got {type(wrong).__name__}"):
            InferenceEngine(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engine_cannot_be_pickled_or_copied(use: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"^an engine owns memory and threads"):
        use(fake_engine())


def test_calls_from_other_threads_raise_engine_busy() -> None:
    expected = content(fake_engine().generate([PROMPT], PARAMS))
    engine = fake_engine()
    engine.parts.runner.on_step = hold = Hold()
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([PROMPT], PARAMS),
        lambda: engine.add_request(PROMPT, PARAMS),
        *(engine.abort_all, engine.step, engine.flush_cache, engine.pause, engine.sleep, engine.shutdown),
    ]
    with ThreadPoolExecutor(len(calls) + 1) as threads:
        running = threads.submit(engine.generate, [PROMPT], PARAMS)
        hold.is_inside.wait()
        for call in calls:
            with pytest.raises(EngineBusy, match="another thread"):
                threads.submit(call).result()
        assert engine.is_alive and engine.get_weight_version() == 0 and engine.has_pending()
        hold.may_leave.set()
        assert content(running.result()) == expected
    assert content(engine.generate([PROMPT], PARAMS)) == expected and is_idle(engine)


class Calling:
    """A program, and a matcher, that calls the engine from inside a step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def start(self) -> object:
        return 0

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        assert isinstance(state, int)
        if state == 2:
            self.call()
        return state + 1, ()

    def advance(self, token: int) -> None:
        self.call()

    def mask(self) -> None:
        return None


@pytest.mark.parametrize("name", ["generate", "abort_all", "step", "flush_cache", "sleep", "shutdown"])
def test_a_program_that_calls_the_engine_ends_its_own_sample(name: str) -> None:
    expected = content(fake_engine().generate([PROMPT], PARAMS))
    engine = fake_engine()
    calling = Calling(lambda: getattr(engine, name)(*([[PROMPT], PARAMS] if name == "generate" else [])))
    good = engine.add_request(PROMPT, PARAMS)
    bad = engine.add_request(PROMPT, PARAMS, program=calling)
    worse = engine.add_request(PROMPT, PARAMS, make_matcher=lambda: calling)
    samples = run_to_end(engine)
    assert content([samples[good]]) == expected
    for request in (bad, worse):
        assert samples[request].finish_reason == "abort"
        assert "EngineBusy: the engine was called from inside" in str(samples[request].stop_reason)
    assert engine.is_alive and is_idle(engine)


class Program:
    """Forces what it is given after the third token."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def start(self) -> object:
        return 0

    def step(self, state: int, token: int) -> object:
        return (state + 1, self.answer) if state == 2 else (state + 1, ())


class Whole(Program):
    """Returns what it is given."""

    def step(self, state: int, token: int) -> object:
        return self.answer


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program((5.0,)), "the token program forced 5.0, which is not an integer"),
        (Program((True,)), "the token program forced True, which is not an integer"),
        (Program(np.array([[1, 2], [3, 4]])), "which is not an integer"),
        (Program((VOCAB_SIZE,)), "forced 50, outside the vocabulary of 50"),
        (Program("78"), "must force a tuple of token ids, got '78'"),
        (Program(7), "must force a tuple of token ids, got 7"),
        (Whole(None), "must return (state, tokens), got None"),
    ],
)
def test_program_with_invalid_result_ends_its_own_sample(program: Program, message: str) -> None:
    expected = content(fake_engine().generate([PROMPT], PARAMS))
    engine = fake_engine()
    good = engine.add_request(PROMPT, PARAMS)
    bad = engine.add_request(PROMPT, PARAMS, program=program)  # type: ignore[arg-type]
    samples = run_to_end(engine)
    assert samples[bad].finish_reason == "abort" and message in str(samples[bad].stop_reason)
    assert content([samples[good]]) == expected and is_idle(engine)


def test_integers_of_other_libraries_become_python_ints() -> None:
    program = Program([np.int64(3), np.uint8(4)])
    (sample,) = fake_engine().generate([PROMPT], PARAMS, program=program)  # type: ignore[arg-type]
    assert sample.completion_tokens[3:5] == (3, 4) and all(type(token) is int for token in sample.completion_tokens)


class Matcher:
    """Returns what it is given, from the second token on."""

    def __init__(self, mask: object, verdict: object) -> None:
        self.answers = (mask, verdict)
        self.num_seen = 0

    def advance(self, token: int) -> object:
        self.num_seen += 1
        return self.answers[1] if self.num_seen > 1 else None

    def mask(self) -> object:
        return self.answers[0] if self.num_seen > 1 else ALL_BITS


@pytest.mark.parametrize(
    ("mask", "verdict", "message"),
    [
        (b"", None, "the matcher's mask must be None or bytes, at least one, got b''"),
        (bytearray(7), None, "the matcher's mask must be None or bytes"),
        (b"\x00" * 7, None, "no token can be drawn"),
        (None, True, "the matcher's verdict is True, which is not an integer"),
        (None, 1.5, "the matcher's verdict is 1.5, which is not an integer"),
    ],
)
def test_matcher_with_invalid_result_ends_its_own_sample(
    mask: object, verdict: object, message: str, tied: Pair, open_engine: OpenEngine
) -> None:
    engine = open_engine(tied)
    expected = content(engine.generate([PROMPT], PARAMS))
    good = engine.add_request(PROMPT, PARAMS)
    bad = engine.add_request(PROMPT, PARAMS, make_matcher=lambda: Matcher(mask, verdict))
    samples = run_to_end(engine)
    assert samples[bad].finish_reason == "abort" and message in str(samples[bad].stop_reason)
    assert content([samples[good]]) == expected and is_idle(engine)


class Insisting:
    """Asks to stop after every token, and allows two tokens."""

    def advance(self, token: int) -> str:
        return "verdict"

    def mask(self) -> bytes:
        return (1 << 40 | 1 << 41).to_bytes(8, "little")


def test_stop_before_min_tokens_keeps_the_mask(tied: Pair, open_engine: OpenEngine) -> None:
    engine = open_engine(tied)
    params = SamplingParams(max_tokens=12, min_tokens=8, seed=1, ignore_eos=True)
    engine.add_request(PROMPT, params, make_matcher=Insisting)
    (sample,) = run_to_end(engine).values()
    assert len(sample.completion_tokens) == 9 and set(sample.completion_tokens) <= {40, 41}
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "verdict")


@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_a_stream_that_ends_inside_a_step_is_aborted(how: str) -> None:
    engine = fake_engine()
    streams = [engine.stream(PROMPT, replace(PARAMS, max_tokens=300))]
    next(streams[0])

    def let_go(number: int) -> None:
        if how == "closed":
            streams[0].close()
        streams.clear()
        gc.collect()
        engine.parts.runner.on_step = lambda number: None

    engine.parts.runner.on_step = let_go
    before = engine.parts.runner.num_computed
    engine.generate([PROMPT], PARAMS)
    assert is_idle(engine) and not streams
    assert engine.parts.runner.num_computed - before < 60


def test_a_dropped_stream_is_not_drained() -> None:
    engine = fake_engine()
    next(engine.stream(PROMPT, replace(PARAMS, max_tokens=300)))
    before = engine.parts.runner.num_computed
    engine.pause("wait")
    assert is_idle(engine) and engine.parts.runner.num_computed == before


def test_refused_next_leaves_the_stream_unchanged() -> None:
    engine = fake_engine()
    params = replace(PARAMS, max_tokens=40)
    expected = engine.generate([PROMPT], params)[0].completion_tokens
    stream = engine.stream(PROMPT, params)
    tokens = list(next(stream).token_ids)
    engine.parts.runner.on_step = hold = Hold()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(engine.generate, [PROMPT], params)
        hold.is_inside.wait()
        try:
            for _ in range(3):
                with pytest.raises(EngineBusy):
                    next(stream)
        finally:
            hold.may_leave.set()
        running.result()
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tuple(tokens) == expected
    assert list(stream) == [] and is_idle(engine)
