"""A short run of benchmarks/reliability/fuzz_engine.py on fixed worlds, and errors that it must find."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

RELIABILITY = str(Path(__file__).parents[2] / "benchmarks" / "reliability")
sys.path.insert(0, RELIABILITY)

import fuzz_engine  # noqa: E402
from differential.oracle import Distribution, DrawContext, uniform  # noqa: E402
from fuzz_engine import Plan, Totals, try_world  # noqa: E402

from nano_inference.core.step import BlockCopy, Row, RowResult, Runner  # noqa: E402
from nano_inference.executors import sampling  # noqa: E402
from nano_inference.types import SamplingParams  # noqa: E402

PLANS = (
    Plan(1001, "llama3-rope-ratio3-tied", "c"),
    Plan(2011, "mistral-window", "c"),
    Plan(3002, "smollm3-layers-without-rope", "torch"),
    Plan(3003, "gemma2", "c"),
    Plan(2002, "qwen3-ratio3-tied", "c"),
    Plan(2001, "qwen2-yarn-window", "torch"),
    Plan(3001, "gemma3", "torch"),
)
"""The cheapest first."""
CUDA_PLANS = (
    Plan(5, "qwen3-ratio3-tied", "cuda"),
    Plan(7, "qwen3-ratio3-tied", "cuda"),
    Plan(6, "gemma2", "cuda"),
    Plan(5, "llama3-rope-ratio3-tied", "cuda"),
)
"""The CUDA executor on CPU tensors, with plain kernels."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refused updates are part of a world and logged as errors."""
    caplog.set_level(logging.CRITICAL, "nano_inference")


def test_fixed_worlds_agree_with_the_oracle() -> None:
    totals = Totals()
    for plan in PLANS:
        totals.add(plan, try_world(plan))
    assert totals.failures == []
    assert totals.worst <= 1e-4
    enough = {"tokens": 800, "preemptions": 4, "updates": 8, "aborts": 4, "resumed": 3, "replays": 5, "drafts": 3}
    found = {name: totals.counts[name] for name in (*enough, "tokens over mixed K/V", "refused updates")}
    assert min(found.values()) > 0 and all(found[name] >= least for name, least in enough.items()), found


def test_fixed_worlds_on_the_cuda_executor_agree_with_the_oracle() -> None:
    totals = Totals()
    for plan in CUDA_PLANS:
        totals.add(plan, try_world(plan))
    assert totals.failures == [] and totals.worst <= 1e-4
    enough = {"tokens": 600, "preemptions": 10, "updates": 9, "aborts": 9, "drafts": 20, "resumed": 9}
    assert all(totals.counts[name] >= least for name, least in enough.items()), totals.counts


class Spoiled:
    """A runner whose rows, copies or results are changed on the way."""

    failure = None

    def __init__(
        self,
        inner: Runner,
        row: Callable[[Row], Row] = lambda row: row,
        result: Callable[[RowResult], RowResult] = lambda result: result,
        *,
        has_copies: bool = True,
    ) -> None:
        self._inner = inner
        self._row = row
        self._result = result
        self._has_copies = has_copies

    def free_cache(self) -> None:
        self._inner.free_cache()

    def restore_cache(self) -> None:
        self._inner.restore_cache()

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        rows = tuple(self._row(row) for row in rows)
        copies = copies if self._has_copies else ()
        return {name: self._result(result) for name, result in self._inner.run(rows, copies, fresh).items()}


def shifted(result: RowResult) -> RowResult:
    """A log-probability is twice the tolerance too high."""
    return result._replace(logprobs=tuple(value + 2e-4 for value in result.logprobs))


SPOILS: dict[str, Callable[[Runner], Runner]] = {
    "log-probabilities off by 2e-4": lambda inner: Spoiled(inner, result=shifted),
    "scores off by 2e-4": lambda inner: Spoiled(
        inner, result=lambda result: result._replace(scores=tuple(value - 2e-4 for value in result.scores))
    ),
    "another seed": lambda inner: Spoiled(inner, lambda row: row._replace(seed=row.seed + 1)),
    "stop tokens not banned": lambda inner: Spoiled(inner, lambda row: row._replace(banned=())),
    "the matcher's mask ignored": lambda inner: Spoiled(inner, lambda row: row._replace(mask=None)),
    "the last token missing in penalties": lambda inner: Spoiled(
        inner, lambda row: row._replace(history=row.history[:-1])
    ),
    "blocks not copied": lambda inner: Spoiled(inner, has_copies=False),
}


@pytest.mark.parametrize("error", SPOILS)
def test_fuzzer_detects_a_wrong_runner(error: str) -> None:
    assert any(try_world(plan, SPOILS[error]).faults for plan in PLANS)


def test_the_printed_command_repeats_its_world() -> None:
    plan = Plan(5, "gemma2", "torch", 100)
    given = fuzz_engine.arguments(plan.command.split()[2:])
    assert fuzz_engine.plans(given) == [plan]


@pytest.mark.parametrize("seed", range(12))
def test_the_oracle_draws_as_the_sampler_does(seed: int) -> None:
    """On the same logits both give the same token, mask and log-probability."""
    logits_BV = torch.randn(1, 200, generator=torch.Generator().manual_seed(seed)) * 2
    params = SamplingParams(
        temperature=0.7,
        top_k=(0, 9)[seed % 2],
        top_p=(1.0, 0.8)[seed // 2 % 2],
        min_p=(0.0, 0.05, 0.2)[seed // 4],
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        sampling_mask=True,
    )
    history = (3, 5, 5, 9, 9, 9)
    row = Row(
        id=0,
        tokens=(9,),
        prev_token=9,
        start=5,
        blocks=(),
        num_sampled=1,
        params=params,
        logprobs_mode="processed",
        seed=seed,
        sample_index=2,
        history=history,
        num_prompt=2,
    )
    (found,) = sampling.draw(logits_BV.clone(), [row])
    (token,), (logprob,), (extra,) = found.tokens, found.logprobs, found.extras
    context = DrawContext(params=params, mode="processed", history=history, num_prompt=2, uniform=uniform(seed, 2, 6))
    distribution = Distribution(logits_BV[0], context)
    assert distribution.accept_mask(extra.sampling_mask) and distribution.is_drawable(token)
    interval = distribution.interval(token)
    assert interval is not None
    assert logprob == pytest.approx(interval.low, abs=1e-5) and logprob == pytest.approx(interval.high, abs=1e-5)
    others = [other for other in range(200) if other != token and distribution.is_drawable(other)]
    assert len(others) <= 1, "only a neighbour at a border may do as well"
