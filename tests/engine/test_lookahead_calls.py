"""Updates and aborts that arrive while a window runs, from another thread: they take effect at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from nano_inference import AsyncEngine, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.build import EngineParts, assemble, parts_of
from nano_inference.core.step import BlockCopy, Launch, Row, RowResult, Runner
from nano_inference.types import OnRunning
from tests.cuda.engines import executor_of
from tests.engine.test_batch_invariance import open_engine
from tests.engine.test_lookahead import PLAIN, REPEATING, bare, finish, run_until

LOOKAHEAD = 5
SECOND = 2
"""The window in which a call arrives."""
TIMEOUT_S = 60.0

Engine = AsyncEngine[InferenceEngine]
Call = Callable[[Engine], Coroutine[Any, Any, Any]]


class InterruptedRunner:
    """A runner that lets another thread act in the middle of one window, and waits until it has."""

    def __init__(self, runner: Runner, launch: Launch | None, lookahead: int) -> None:
        self._runner, self._launch, self._lookahead, self._num_windows = runner, launch, lookahead, 0
        self.has_started, self.may_end = Event(), Event()

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        self._wait(rows)
        return dict(self._runner.run(rows, copies, fresh))

    def launch(self, rows: tuple[Row, ...], *given: Any, is_next: bool) -> Callable[[], Mapping[int, RowResult]] | None:
        assert self._launch is not None
        collect = self._launch(rows, *given, is_next=is_next)

        def wait_and_collect() -> Mapping[int, RowResult]:
            self._wait(rows)
            return collect()

        return None if collect is None else wait_and_collect

    def _wait(self, rows: tuple[Row, ...]) -> None:
        self._num_windows += all(row.num_sampled == self._lookahead for row in rows)
        if self._num_windows == SECOND and not self.has_started.is_set():
            self.has_started.set()
            assert self.may_end.wait(TIMEOUT_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def config_of(path: Path, lookahead: int) -> EngineConfig:
    options: Any = {"device": "cpu", "kv_cache_bytes": 16 << 20, "num_threads": 1, "max_batch_size": 8}
    return EngineConfig(str(path), lookahead=lookahead, **options)


def cuda_parts(config: EngineConfig) -> EngineParts:
    """Return the parts of an engine on the CUDA executor, on CPU tensors."""
    return parts_of(executor_of(Path(config.model_path), config), config)


def with_a_call(parts: EngineParts, config: EngineConfig, call: Call) -> tuple[list[TrainingSample], Any]:
    """Return three samples of a prompt, and the result of `call`, which arrives while their second window runs."""
    runner = InterruptedRunner(parts.runner, parts.launch, config.lookahead or 1)
    parts = replace(parts, runner=runner, launch=None if parts.launch is None else runner.launch)

    async def main() -> tuple[list[TrainingSample], Any]:
        async with AsyncEngine(lambda: InferenceEngine(config, parts=parts)) as engine:
            generated = asyncio.create_task(engine.generate([REPEATING], PLAIN, 3))
            assert await asyncio.to_thread(runner.has_started.wait, TIMEOUT_S)
            called = asyncio.create_task(call(engine))
            while not engine.num_commands:
                await asyncio.sleep(0)
            runner.may_end.set()
            answer = await called
            return [bare(sample) for sample in await generated], answer

    return asyncio.run(main())


def update_call(on_running: OnRunning) -> Call:
    return lambda engine: engine.call(lambda inner: update(inner, on_running))


def update(engine: InferenceEngine, on_running: OnRunning) -> int:
    """Replace the weights by larger ones."""
    assert engine.parts.executor is not None
    weights = {name: value * 1.25 for name, value in engine.parts.executor.weights.values()}
    return engine.update_weights(weights, blocking=True, on_running=on_running)


@pytest.mark.parametrize("on_running", ["keep", "recompute", "abort", "wait"])
def test_an_update_in_a_window_is_installed_at_its_end(tiny_llama: Path, on_running: OnRunning) -> None:
    with open_engine(tiny_llama) as engine:
        request = run_until(engine, 1 + SECOND * LOOKAHEAD)
        update(engine, on_running)
        expected = finish(engine, request)
    config = config_of(tiny_llama, LOOKAHEAD)
    samples, _ = with_a_call(assemble(config), config, update_call(on_running))
    assert samples == expected
    if on_running != "wait":
        assert [sample.token_versions.count(0) for sample in samples] == sizes_after(SECOND, LOOKAHEAD)


def sizes_after(num_windows: int, lookahead: int) -> list[int]:
    """Return the tokens of the three samples; the first one's prompt is computed a step earlier."""
    return [2 + num_windows * lookahead, 1 + num_windows * lookahead, 1 + num_windows * lookahead]


def test_an_abort_in_a_window_keeps_the_tokens_of_the_window(tiny_llama: Path) -> None:
    with open_engine(tiny_llama) as engine:
        whole = finish(engine, run_until(engine, 1))
    config = config_of(tiny_llama, LOOKAHEAD)
    samples, _ = with_a_call(assemble(config), config, lambda engine: engine.call(InferenceEngine.abort_all))
    assert [len(sample.completion_tokens) for sample in samples] == sizes_after(SECOND, LOOKAHEAD)
    for sample, other in zip(samples, whole, strict=True):
        size = len(sample.completion_tokens)
        assert sample.finish_reason == "abort" and sample.completion_tokens == other.completion_tokens[:size]
        assert sample.logprobs == other.logprobs[:size] and sample.token_versions == (0,) * size


def test_a_request_in_a_window_changes_no_bit(tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=9, seed=8, ignore_eos=True)
    with open_engine(tiny_llama) as engine:
        (late,) = engine.generate([[7, 7, 7]], params)
        whole = finish(engine, run_until(engine, 1))
    config = config_of(tiny_llama, 16)
    samples, (other,) = with_a_call(assemble(config), config, lambda engine: engine.generate([[7, 7, 7]], params))
    assert samples == whole and bare(other) == bare(late)


def test_an_update_in_a_window_of_the_cuda_executor(tiny_llama: Path) -> None:
    config = config_of(tiny_llama, 16)
    with InferenceEngine(config, parts=cuda_parts(config)) as engine:
        request = run_until(engine, 1 + SECOND * 16)
        update(engine, "keep")
        expected = finish(engine, request)
    samples, _ = with_a_call(cuda_parts(config), config, update_call("keep"))
    assert samples == expected
    assert [sample.token_versions.count(0) for sample in samples] == sizes_after(SECOND, 16)
