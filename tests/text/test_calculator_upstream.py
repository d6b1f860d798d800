"""3,000 random expressions and 150 attacks against answers recorded from upstream's calculator.

upstream_calculator.json has, for each expression, upstream's answer and the documented bound (docs/nanochat.md) for
which this calculator has none; `benchmarks/calculator_answers.py` records it.
"""

from __future__ import annotations

import json
import tracemalloc

from benchmarks.calculator_answers import ANSWERS, answer_of
from nano_inference.nanochat.calculator import calculate, evaluate

ROWS: list[tuple[str, str | None, str | None]] = json.loads(ANSWERS.read_text(encoding="utf-8"))


def test_every_answer_equals_upstreams_or_a_bound_explains_it() -> None:
    assert len(ROWS) > 3000
    wrong = [text for text, theirs, bound in ROWS if answer_of(calculate(text)) != (None if bound else theirs)]
    assert wrong == []


def test_attacks_take_little_memory() -> None:
    tracemalloc.start()
    try:
        for text, _, _ in ROWS[-150:]:
            tracemalloc.reset_peak()
            calculate(text)
            evaluate(text)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20, text[:80]
    finally:
        tracemalloc.stop()
