"""Questions and chats for the packaged model that its training data does not generate, in data/calculator.tsv.

A question is written as "expression:text", a chat as "beginning of a fitting reply:text"; the letters in braces are
numbers, {s} is the square of {a}, {t} has eight to ten digits, and {u}, {v} are {a}, {b} in words.
"""

from __future__ import annotations

import random
from pathlib import Path

from calculator_data import result_text
from calculator_numbers import in_words

PATTERNS: dict[str, tuple[str, ...]] = {}
"""Questions, and chats with the beginning of a fitting reply, by kind."""
for _line in Path(__file__).with_name("data").joinpath("calculator.tsv").read_text(encoding="utf-8").splitlines():
    _kind, _, _pattern = _line.partition("\t")
    PATTERNS[_kind] = (*PATTERNS.get(_kind, ()), _pattern)
CHATS = PATTERNS.pop("chats")


def asked(n: int, seed: int, patterns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return n questions of the patterns, in turn, and their results, with random numbers of up to three digits."""
    rng = random.Random(seed)
    found = []
    for place in range(n):
        a, b, c, d, e = (rng.randrange(2, 10 ** rng.choice((1, 2, 2, 3))) for _ in range(5))
        c, d, e = c % 50 + 10, d % 9 + 2, e % 7 + 2
        names = {"a": a, "b": b, "c": c, "d": d, "e": e, "s": a * a, "t": rng.randrange(10**7, 10**10)}
        spoken = {"u": in_words(a), "v": in_words(b), "x": in_words(e), "y": " ".join(in_words(int(i)) for i in str(c))}
        expression, text = patterns[place % len(patterns)].split(":", 1)
        result = result_text(expression.format(**names, **spoken))
        assert result is not None
        found.append((text.format(**names, **spoken), result))
    return found
