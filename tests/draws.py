"""What `sampling.draw` and its like give, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nano_inference.core.step import DrawExtras, RowResult
from nano_inference.executors import sampling
from nano_inference.types import TopLogprobs


class Draw(NamedTuple):
    """One token a row."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    extras: tuple[DrawExtras, ...] = ()
    """Empty when no row asked for any."""


def columns(results: Sequence[RowResult]) -> Draw:
    """Return drawn tokens as columns; each result has one."""
    assert all(len(one.tokens) == 1 for one in results)
    has_extras = any(one.extras for one in results)
    extras = tuple((one.extras or (DrawExtras(),))[0] for one in results) if has_extras else ()
    return Draw(
        tuple(one.tokens[0] for one in results),
        tuple(one.logprobs[0] for one in results),
        tuple(one.top_logprobs[0] for one in results),
        extras,
    )


def draw(*given: Any) -> Draw:
    """Return `sampling.draw` as columns."""
    return columns(sampling.draw(*given))
