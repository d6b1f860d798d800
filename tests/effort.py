"""How many random cases the tests try: `make thorough` tries all, other runs a part, the same ones each time."""

from __future__ import annotations

import os

IS_THOROUGH = bool(os.environ.get("NANO_INFERENCE_THOROUGH"))
_SHARE = 1.0 if IS_THOROUGH else 1 / 3


def some(count: int) -> int:
    """Return how many of `count` cases, or of what they add up to, this run tries or has to see: at least one."""
    return max(1, round(count * _SHARE))


def few(count: int) -> int:
    """Like `some`, but a sixth: for cases that take long, and whose kinds all occur in the first ones."""
    return count if IS_THOROUGH else max(1, round(count / 6))
