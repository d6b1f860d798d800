"""30,000 random expressions and 150 attacks against answers recorded from upstream's calculator."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import pytest

from benchmarks.nanochat_calculator.compare import (
    BLOCK,
    BOUNDS,
    Answer,
    answer_of,
    block_digest,
    bound_of,
    recorded,
    texts,
)
from benchmarks.nanochat_calculator.expressions import COUNT, attacks
from nano_inference.nanochat.calculator import calculate, evaluate


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return recorded()


def test_every_answer_equals_upstreams_or_a_bound_explains_it(record: dict[str, Any]) -> None:
    differing: dict[str, list[Any]] = record["differing"]
    pairs: list[tuple[str, Answer]] = []
    for text in texts():
        ours = answer_of(calculate(text))
        if text in differing:
            theirs, bound = differing[text]
            assert ours is None and bound_of(text, theirs) == bound, text
            ours = theirs
        pairs.append((text, ours))
    assert len(pairs) == record["expressions"] == COUNT + 150
    digests = [block_digest(pairs[start : start + BLOCK]) for start in range(0, len(pairs), BLOCK)]
    assert digests == record["blocks"]


def test_record_covers_every_bound_and_mostly_equal_answers(record: dict[str, Any]) -> None:
    bounds = Counter(bound for _, bound in record["differing"].values())
    assert set(bounds) <= set(BOUNDS) and len(bounds) >= 7
    assert bounds.total() < 0.02 * record["expressions"] and record["answered"] > 0.6 * record["expressions"]


def test_attacks_take_little_memory() -> None:
    tracemalloc.start()
    try:
        for text in attacks():
            tracemalloc.reset_peak()
            calculate(text)
            evaluate(text)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20, text[:80]
    finally:
        tracemalloc.stop()
