"""`Vocabulary`: the sampling operations that read all logits of a row; with tensor parallelism a rank has some of them.

Token ids are those of the whole vocabulary. Shapes: B rows, V logits in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nano_inference.core.step import Row
from nano_inference.executors.logprobs import Normaliser
from nano_inference.executors.truncation import Truncation
from nano_inference.types import TopLogprobs


class Vocabulary(Protocol):
    """Computes over whole rows of logits, with the same results on every rank.

    `sampling.WholeVocabulary` is the reference, also for rows whose logits contain NaN.
    """

    def local(self, row: Row) -> Row:
        """Return the row with the ids of its bias, masks and history as indices into this process's logits."""

    def size_of(self, logits_BV: Tensor) -> int:
        """Return the number of ids of the whole vocabulary."""

    def largest(self, logits_BV: Tensor) -> Tensor:
        """Return each row's largest logit [B, 1]."""

    def argmax(self, logits_BV: Tensor) -> Tensor:
        """Return each row's best token [B]; the lowest id wins a tie."""

    def normalise(self, logits_BV: Tensor, temperatures: Sequence[float]) -> Normaliser:
        """Return the rows' normaliser; see `logprobs.Normalise`."""

    def truncate(self, logits_BV: Tensor, scaled_BV: Tensor, cuts: Sequence[Truncation]) -> None:
        """Set what each row's truncation excludes to -inf, in both tensors, in place."""

    def ids_above_zero(self, scaled_V: Tensor) -> list[int]:
        """Return the ids whose probability is not 0, ascending."""

    def invert_cdf(self, scaled_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """Return each row's first token at which the cumulative probability exceeds its uniform, [B]."""

    def at(self, logits_BV: Tensor, token_B: Tensor) -> Tensor:
        """Return the logit of one token of each row, [B, 1]."""

    def ranks(self, logits_BV: Tensor, own_B1: Tensor) -> list[int]:
        """Return 1 + the number of ids of each row whose logit exceeds the given one."""

    def tops(self, logits_BV: Tensor, normaliser: Normaliser, counts: Sequence[int]) -> tuple[TopLogprobs, ...]:
        """Return each row's most probable tokens; see `logprobs.top_logprobs`."""
