"""A step's tokens and rows, as every executor gets them.

Shapes: T tokens of the step (all rows one after another).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """One row's place in a step."""

    offset: int
    """Index of its first token among the step's T."""
    num_tokens: int
    start: int
    """Position of its first token in the sequence."""
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position after its last token, which is also how many keys that token sees without a window."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """A step as tensors and spans."""

    token_T: Tensor
    prev_T: Tensor
    """The token before each token, -1 at the start of a sequence."""
    position_T: Tensor
    slot_T: Tensor
    """Where each token's K/V goes in the store."""
    spans: tuple[Span, ...]
    """Rows of one token first, shortest sequence first, then the chunks."""
