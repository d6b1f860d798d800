"""Answers that repeat themselves."""

from __future__ import annotations

import pytest

from nano_inference.text.stream import repeats

LOOP = [5, 6, 7] * 50


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], False),
        (list(range(1000)), False),
        ([1] * 127, False),
        ([1] * 128, True),
        ([*range(100, 300), *LOOP], True),
        ([*LOOP, 8], False),
        (list(range(48)) * 5, False),
        (list(range(48)) * 6, True),
        (list(range(49)) * 20, False),
        ([*"ab"] * 64, True),
    ],
)
def test_repetition_is_six_equal_periods_and_128_tokens(tokens: list[object], found: bool) -> None:
    assert repeats(tokens) is found
