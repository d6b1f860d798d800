"""A step's tokens and rows as tensors.

Shapes: T tokens of the step (rows concatenated).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nano_inference.core.step import RowState


class Span(NamedTuple):
    """One row of a step."""

    offset: int  # index of its first token among the T tokens
    num_tokens: int
    start: int  # position of its first token in the sequence
    blocks: tuple[int, ...]
    state: RowState | None = None  # None for programs without recurrent states

    @property
    def end(self) -> int:
        """Return the position after its last token, which is the number of keys that token sees without a window."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """A step as tensors and spans."""

    token_T: Tensor
    prev_T: Tensor  # the token before each token, -1 at the start of a sequence
    position_T: Tensor
    slot_T: Tensor  # the cache slot of each token's K/V
    spans: tuple[Span, ...]  # rows of one token first, by sequence length, then rows of several tokens (prefill chunks)
