"""Detection of an answer that repeats itself, with the limits of the page's `repeats` (`server/web/chat/stream.js`)."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD, MIN_TIMES, MIN_TOKENS = 48, 6, 128


def repeats(tokens: Sequence[object]) -> bool:
    """Return True if at least the last 128 tokens are one sequence of at most 48, six times or more."""
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_TIMES * period, MIN_TOKENS)
        if len(tokens) >= length and tokens[-length:-period] == tokens[period - length :]:
            return True
    return False
