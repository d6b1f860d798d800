"""A real SIGINT at any place of a step, an update or a stream: no dead engine, no lost block, the same tokens later."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, EngineDead, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.executors.live_weights import LiveWeights
from nano_inference.weights.sync import WeightSyncManager
from tests.sim.fakes import Calculator, fake_config, raising
from tests.sim.versioned import content, new_weights, run_to_end, versioned_engine

PROMPTS = [[5, 9, 30, 2, 44, 8, 1], [5, 9, 30, 2, 11], [3]]
PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, prompt_logprobs=0)
WAITING = [5, 9, 30, 1, 1]


def make_engine(cache_type: str = "radix") -> InferenceEngine:
    """An engine whose cache is small: its steps preempt, share and evict."""
    return versioned_engine(cache_type, 26, 4, replace(fake_config(), max_tokens_per_batch=16))


def generate(engine: InferenceEngine) -> list[TrainingSample]:
    return engine.generate(PROMPTS, PARAMS, 2, program=Calculator())


def stream(engine: InferenceEngine) -> None:
    for _ in engine.stream(PROMPTS[0], PARAMS, 2):
        pass


def assert_whole(engine: InferenceEngine, expected: list[tuple[object, ...]]) -> None:
    """The engine works, gives what a fresh one gives, and holds nothing afterwards."""
    assert engine.is_alive
    run_to_end(engine)
    assert content(generate(engine)) == expected
    assert not engine.has_pending()
    engine.cache.check()
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks


def strike(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, at: int, *, after: bool) -> list[int]:
    """Send SIGINT in the `at`-th call of a method, before or after its work; the list is empty until then."""
    method: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []
    struck: list[int] = []

    def struck_method(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        is_struck = calls[-1] == at
        if is_struck:
            struck.append(at)
        if is_struck and not after:
            signal.raise_signal(signal.SIGINT)
        result = method(*args, **kwargs)
        if is_struck and after:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, struck_method)
    return struck


PLACES = {
    "plan": (lambda engine: engine.cache, "take"),
    "commit": (lambda engine: engine.cache, "publish"),
    "run": (lambda engine: engine.parts.runner, "run"),
}


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("work", [generate, stream], ids=["generate", "stream"])
def test_sigint_in_a_step(
    work: Callable[[InferenceEngine], object], place: str, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(generate(make_engine(cache_type)))
    alone = make_engine(cache_type).generate([WAITING], PARAMS)
    engine = make_engine(cache_type)
    find, name = PLACES[place]
    for at in range(1, 13):
        waiting = engine.add_request(WAITING, PARAMS)
        with monkeypatch.context() as patch:
            struck = strike(patch, find(engine), name, at, after=bool(at % 2))
            with pytest.raises(KeyboardInterrupt):
                work(engine)
        assert struck
        assert content([run_to_end(engine)[waiting]]) == content(alone), "another request was affected"
        assert_whole(engine, expected)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(WeightSyncManager, "stage"), (LiveWeights, "commit")])
def test_sigint_in_an_update(owner: type, name: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is gathered is dropped; one that is installed gets installed whole."""
    engine = make_engine()
    for number in range(1, 6):
        with monkeypatch.context() as patch:
            strike(patch, owner, name, 1, after=after)
            with pytest.raises(KeyboardInterrupt):
                engine.update_weights(new_weights(), blocking=True, version=number)
        installed = (number, number) if name == "commit" else (0, None)
        assert engine.weight_info() == (*installed, "idle")
        assert set(generate(engine)[0].token_versions) == {installed[0]}


def test_sigint_while_waiting_for_an_update_leaves_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    engine.update_weights(new_weights())
    assert engine.weight_sync is not None
    strike(monkeypatch, engine.weight_sync, "wait", 1, after=False)
    with pytest.raises(KeyboardInterrupt):
        engine.finish_update()
    assert engine.finish_update() == 1


def interrupt(engine: InferenceEngine, expected: list[tuple[object, ...]], count: int, longest: float) -> None:
    """Send signals from a timer, so at any bytecode, and check the engine after each."""
    rng, num_interrupts = random.Random(7), 0
    for i in range(count):
        previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:  # the timer starts inside: on a busy machine it ends before the next line
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.random() * longest)
            for _ in range(100):
                (generate, stream)[i % 2](engine)
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert_whole(engine, expected)
    assert num_interrupts == count


@pytest.mark.slow
def test_random_sigints() -> None:
    interrupt(make_engine(), content(generate(make_engine())), 60, 0.01)


@pytest.mark.nightly
def test_random_sigints_in_the_c_kernels(tmp_path: Path) -> None:
    from tests.models.families import make_model  # imports Transformers

    make_model("qwen3-ratio3-tied", tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", kv_cache_bytes=1 << 18, max_tokens_per_batch=16, block_size=4)
    with InferenceEngine(config) as fresh, InferenceEngine(config) as engine:
        interrupt(engine, content(generate(fresh)), 600, 0.03)


def test_step_returns_samples_before_a_sigint_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a step that ends with Ctrl-C are those of the next step."""
    engine = make_engine()
    short = replace(PARAMS, max_tokens=1)
    expected = make_engine().generate([WAITING], short)
    engine.add_request(WAITING, short)
    strike(monkeypatch, engine.cache, "publish", 1, after=True)
    samples: list[TrainingSample] = []
    with pytest.raises(KeyboardInterrupt):
        while engine.has_pending():
            samples += engine.step()
    assert not samples
    assert content(list(run_to_end(engine).values())) == content(expected)


def test_a_handler_of_ones_own_is_called_and_stays() -> None:
    calls: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        engine = make_engine()

        def progress(_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        engine.generate(PROMPTS, PARAMS, progress=progress)
        assert len(calls) > 3
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_callers_code_is_interrupted_at_once() -> None:
    engine = make_engine()

    def work() -> None:
        engine.add_request(PROMPTS[0], PARAMS, for_call=True)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("SIGINT waited")

    with pytest.raises(KeyboardInterrupt):
        engine.exclusively(work)
    assert not engine.has_pending()


@pytest.mark.parametrize("place", ["commit", "undo"])
def test_an_exception_in_a_change_ends_the_engine(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    if place == "commit":
        monkeypatch.setattr(engine.cache, "publish", lambda *_: 1 / 0)
    else:
        engine.parts.runner.on_step = raising(RuntimeError("the step failed"), 1)
        monkeypatch.setattr(engine.cache, "release", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.is_alive
    with pytest.raises(EngineDead, match="division"):
        engine.generate(PROMPTS, PARAMS)
    engine.shutdown()


def test_requests_of_a_progress_callback_end_with_the_call() -> None:
    engine = make_engine()
    added: list[int] = []

    def progress(_: object) -> None:
        if not added:
            added.append(engine.add_request(WAITING, replace(PARAMS, max_tokens=40), for_call=True))

    engine.generate(PROMPTS, PARAMS, progress=progress)
    assert added and not engine.has_pending()
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks


def test_a_call_while_another_takes_the_engine_leaves_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector does that ends a stream between two lines of a call's beginning."""
    engine = make_engine()
    before, really_set = signal.getsignal(signal.SIGINT), signal.signal
    calls: list[int] = []

    def setting(number: int, handler: Any) -> Any:
        old = really_set(number, handler)
        calls.append(number)
        if len(calls) == 1:
            engine.flush_cache()
        return old

    monkeypatch.setattr(signal, "signal", setting)
    engine.flush_cache()
    monkeypatch.undo()
    assert len(calls) > 1 and signal.getsignal(signal.SIGINT) is before
