"""Windows in flight: how often there is one, and what interrupts leave behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nano_inference.build import EngineParts
from nano_inference.core.cache import make_kv
from nano_inference.core.step import BlockCopy, Row, RowResult
from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams
from tests.sim.fakes import fake_config, fake_parts, is_idle, raising, reference

PROMPT = [5, 9, 30, 2, 44]
PARAMS = SamplingParams(max_tokens=30, seed=4, ignore_eos=True)


class Idle:
    """A runner that computes nothing."""

    failure = None

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        return {row.id: RowResult(row.id, (1,) * row.num_sampled, (-1.0,) * row.num_sampled) for row in rows}

    def launch(self, rows: tuple[Row, ...], *more: Any, is_next: bool) -> Callable[[], dict[int, RowResult]] | None:
        return (lambda: self.run(rows, (), ())) if all(len(row.tokens) == 1 for row in rows) else None

    def free_cache(self) -> None: ...

    def restore_cache(self) -> None: ...

    def recover(self) -> None: ...


def test_windows_of_a_throughput_benchmark_overlap() -> None:
    """bench.py of nano-vllm: 256 requests of 100 to 1,024 tokens in and out."""
    rng, runner = random.Random(0), Idle()
    parts = EngineParts(
        runner=runner, launch=runner.launch, kv=make_kv("radix", 40_000, 16), vocab_size=50_000, max_model_len=4096,
        lookahead=16,
    )  # fmt: skip
    engine = InferenceEngine(fake_config(max_batch_size=256, max_tokens_per_batch=8192), parts=parts)
    prompts = [[rng.randrange(50_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    engine.generate(prompts, [replace(PARAMS, max_tokens=rng.randint(100, 1024)) for _ in prompts])
    overlaps = dict(engine.overlaps)
    num_passes = overlaps.pop("pass")
    assert overlaps["ahead"] >= 0.9 * sum(overlaps.values()) > num_passes, (overlaps, num_passes)


def overlapping() -> InferenceEngine:
    return InferenceEngine(fake_config(), parts=fake_parts("radix", 100, 4, 4, overlaps=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("where", ["on_step", "on_collect"])
@pytest.mark.parametrize("at", range(3, 7))
def test_an_exception_between_launch_and_results_changes_no_token(
    error: type[BaseException], where: str, at: int
) -> None:
    engine = overlapping()
    ids = [engine.add_request([*PROMPT, i], PARAMS, claim=True) for i in range(3)]
    setattr(engine.parts.runner, where, raising(error(), at))
    num_raised = 0
    while engine.has_pending():
        try:
            engine.tick()
        except (KeyboardInterrupt, RuntimeError):
            num_raised += 1
        engine.cache.check()
    samples = [sample for one in ids for sample in engine.collect(one)]
    num_ended = sum(sample.finish_reason == "abort" for sample in samples)
    assert (num_raised, num_ended) == ((0, 1) if error is MemoryError else (1, 0))
    for i, sample in enumerate(samples):
        tokens = reference([*PROMPT, i], PARAMS, 0)[0]
        assert list(sample.completion_tokens) == tokens[: len(sample.completion_tokens)]
    assert is_idle(engine) and engine.overlaps["ahead"] > 3


def test_what_was_sampled_for_aborted_requests_is_dropped_and_the_next_ones_run() -> None:
    engine = overlapping()
    engine.add_request(PROMPT, PARAMS)
    for _ in range(3):
        engine.tick()
    engine.abort_all()
    assert is_idle(engine)
    (sample,) = engine.generate([PROMPT], PARAMS)
    assert list(sample.completion_tokens) == reference(PROMPT, PARAMS, 0)[0]


def test_requests_that_arrive_in_a_window_end_the_overlap() -> None:
    engine = overlapping()
    ids = [engine.add_request(PROMPT, PARAMS, claim=True)]
    for _ in range(3):
        engine.tick()
    ids.append(engine.add_request(PROMPT[::-1], PARAMS, claim=True))
    assert engine.tick().stats.num_rows == 1
    assert engine.tick().stats.num_rows == 2
    while engine.has_pending():
        engine.tick()
    assert engine.overlaps["arrival"] == 1
    for prompt, one in zip((PROMPT, PROMPT[::-1]), ids, strict=True):
        assert list(engine.collect(one)[0].completion_tokens) == reference(prompt, PARAMS, 0)[0]
