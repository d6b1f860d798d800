"""Rows of a step."""

from __future__ import annotations

from typing import Any

from nano_inference.core.step import Row
from nano_inference.types import SamplingParams


def make_row(number: int = 0, tokens: tuple[int, ...] = (1,), **fields: Any) -> Row:
    """Return a row of tokens that samples nothing and starts at position 0 of block 0; `fields` change that."""
    plain: dict[str, Any] = {"prev_token": -1, "start": 0, "blocks": (0,), "num_sampled": 0, "params": SamplingParams()}
    return Row(id=number, tokens=tokens, **plain | {"logprobs_mode": "raw", "seed": 0, "sample_index": 0} | fields)
