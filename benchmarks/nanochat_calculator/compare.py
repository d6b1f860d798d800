"""Compare the calculator with recorded answers of upstream's, and name the bound behind each difference."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

from benchmarks.nanochat_calculator.expressions import attacks, expressions
from nano_inference.nanochat.calculator import MAX_DEPTH, MAX_EXPRESSION, MAX_RESULT, MAX_TEXT, calculate

ANSWERS = Path(__file__).parent / "answers.json"
BLOCK = 250
"""Expressions of one digest."""
Answer = str | None
"""`type: repr` of a value; only the type of objects without a stable one; None if there is no answer."""
_PLAIN = (int, float, bool, str, bytes, complex, list, tuple, EllipsisType)
_NUMBERS = re.compile(r"\(([0-9]{4,})\)")
_METHOD = re.compile(r"\.(?:count|lower|strip|upper)(?!\()\b")
_NUMBER_AND_WORD = re.compile(r"[0-9](?:and|else|if|in|is|not|or)\b")
_LETTERS = re.compile(r"\b(?:[bB]|[rR][bB]|[bB][rR])['\"]|\.(?:encode|to_bytes)\(")
_COMPLEX = re.compile(r"[0-9][jJ]\b")


def texts() -> list[str]:
    """Return the random expressions, then the attacks."""
    return [*expressions(), *attacks()]


def answer_of(value: Any) -> Answer:
    """Return a value as recorded."""
    if value is None:
        return None
    if not isinstance(value, _PLAIN):
        return f"{type(value).__name__}: object"
    try:
        text = repr(value)
    except ValueError:
        text = "too many digits"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{type(value).__name__}: {text if len(text) <= 2 * MAX_RESULT else digest}"


def _depth(text: str) -> int:
    depth = most = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        most = max(most, depth)
    return most


def _is_long(text: str) -> bool:
    """Return whether an expression pads to, or may join, more than 8192 characters."""
    numbers = [int(number) for number in _NUMBERS.findall(text)]
    return max(numbers, default=0) > MAX_TEXT // (1 + text.count(".join(")) or text.count(".join(") > 3


BOUNDS: Mapping[str, Callable[[str, str], bool]] = {
    "expression of more than 256 characters": lambda text, theirs: len(text) > MAX_EXPRESSION,
    "more than 64 nested parentheses": lambda text, theirs: _depth(text) > MAX_DEPTH,
    "result of more than 256 characters": lambda text, theirs: len(theirs.partition(": ")[2]) > MAX_RESULT,
    "text of more than 8192 characters": lambda text, theirs: _is_long(text),
    "generator expressions": lambda text, theirs: " for " in text,
    "bytes": lambda text, theirs: _LETTERS.search(text) is not None,
    "complex numbers": lambda text, theirs: _COMPLEX.search(text) is not None,
    "methods as values": lambda text, theirs: _METHOD.search(text) is not None,
    "a number and a word without a space": lambda text, theirs: _NUMBER_AND_WORD.search(text) is not None,
}
"""Documented bound -> whether it applies to an expression and upstream's answer."""


def bound_of(text: str, theirs: Answer) -> str | None:
    """Return the bound that explains a missing answer; None if upstream has none, or no bound applies."""
    if theirs is None or calculate(text) is not None:
        return None
    return next((name for name, applies in BOUNDS.items() if applies(text, theirs)), None)


def block_digest(pairs: Sequence[tuple[str, Answer]]) -> str:
    """Return a digest of expressions and their answers."""
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """Read the recorded answers."""
    found: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return found
