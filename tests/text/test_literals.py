"""The pattern for many literal texts: the same matches as alternatives, in linear time."""

from __future__ import annotations

import re
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.text.chat import literal_pattern

WORDS = st.frozensets(st.text("ab<|", min_size=1, max_size=6), min_size=1, max_size=12)
GUARD_S = 120
"""Time limit of the search; trying one alternative after the other takes hours."""


@given(WORDS, st.text("ab<|", max_size=60))
def test_matches_equal_those_of_alternatives_sorted_by_length(words: frozenset[str], text: str) -> None:
    pattern = literal_pattern(words)
    plain = re.compile("|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word))))
    assert pattern is not None
    assert [match.span() for match in pattern.finditer(text)] == [match.span() for match in plain.finditer(text)]


def test_search_time_does_not_grow_with_the_number_of_texts() -> None:
    code = """
from nano_inference.text.chat import literal_pattern
pattern = literal_pattern(frozenset(f"<unused{number}>" for number in range(6000)) | {"[multimodal]"})
assert pattern.search("<" * 20_000_000) is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=GUARD_S)
