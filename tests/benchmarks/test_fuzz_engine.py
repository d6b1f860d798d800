"""A short run of benchmarks/reliability/fuzz_engine.py on fixed worlds, and errors that it must find.

Every number of a world is compared with Transformers under the weights that computed each slot of the KV cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

RELIABILITY = str(Path(__file__).parents[2] / "benchmarks" / "reliability")
sys.path.insert(0, RELIABILITY)

from fuzz_engine import Plan, Totals, try_world  # noqa: E402

from nano_inference.core.step import BlockCopy, Row, RowResult, Runner  # noqa: E402
from nano_inference.types import OnRunning  # noqa: E402

PLANS = (
    Plan(1005, "llama3-rope-ratio3-tied", "c"),
    Plan(1005, "mistral-window", "c"),
    Plan(1003, "gemma2", "c"),
    Plan(1004, "qwen3-ratio3-tied", "c"),
    Plan(1001, "qwen2-yarn-window", "torch"),
    Plan(1003, "smollm3-layers-without-rope", "torch"),
    Plan(1003, "gemma3", "torch"),
)
"""The cheapest first."""
SMALL_PLANS = tuple(
    Plan(seed, ("llama-ratio1-untied", "qwen3-ratio3-tied", "llama3-rope-ratio3-tied")[seed % 3], "c")
    for seed in range(4018, 4030)
)
CUDA_PLANS = (
    Plan(81016, "qwen2-ratio7", "cuda"),  # sleep drops a window, which is drawn again over K/V of another version
    Plan(5, "gemma2", "cuda"),
    Plan(8, "gemma2", "cuda"),
    Plan(6, "llama3-rope-ratio3-tied", "cuda"),
)
"""The CUDA executor on CPU tensors, with plain kernels."""


@pytest.mark.parametrize(
    ("plans", "least"),
    [
        pytest.param(PLANS, 3, marks=pytest.mark.slow, id="families"),
        pytest.param(SMALL_PLANS, 9, marks=pytest.mark.slow, id="small"),
        pytest.param(CUDA_PLANS, 9, marks=pytest.mark.slow, id="cuda"),
    ],
)
def test_fixed_worlds_agree_with_the_oracle(plans: tuple[Plan, ...], least: int) -> None:
    totals = Totals()
    for plan in plans:
        totals.add(plan, try_world(plan))
    assert totals.failures == [] and totals.worst <= 1e-4
    for name in ("preemptions", "updates", "aborts", "resumed", "drafts"):
        assert totals.counts[name] >= least, totals.counts
    assert totals.counts["windows ahead"] > 100 or plans is not CUDA_PLANS
    if plans is SMALL_PLANS:
        kinds = [f"updates {how}" for how in get_args(OnRunning)]
        assert min(totals.counts[name] for name in (*kinds, "pause", "sleep")) >= 3, totals.counts
        assert totals.counts["tokens over mixed K/V"] > 50


class Spoiled:
    """A runner whose rows, copies or results are changed on the way."""

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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


@pytest.mark.slow
@pytest.mark.parametrize("error", SPOILS)
def test_fuzzer_detects_a_wrong_runner(error: str) -> None:
    assert any(try_world(plan, SPOILS[error]).faults for plan in PLANS)
