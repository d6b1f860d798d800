"""Top-k, top-p and min-p of one row of logits: sets what they exclude to -inf.

Shapes: B rows, V vocabulary, K best tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.core.step import Row

_TOP_P_WIDTH = 1024  # best tokens selected first for top-p; if their probability is too small, the whole row is sorted


class Truncation(NamedTuple):
    """A row's truncation parameters."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def is_active(self) -> bool:
        """Whether any token can be excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


NO_TRUNCATION = Truncation(0, 1.0, 0.0)


def is_in_kernels(cut: Truncation) -> bool:
    """Return whether kernels have all of a row's truncation; rows with another option are drawn by `sampling.draw`."""
    return cut == Truncation(cut.top_k, cut.top_p, cut.min_p)


def truncation_of(row: Row) -> Truncation:
    """Return a row's truncation; none at temperature 0."""
    if row.params.temperature == 0:
        return NO_TRUNCATION
    return Truncation(row.params.top_k, row.params.top_p, row.params.min_p)


def truncate(logits_BV: Tensor, scaled_BV: Tensor, cuts: Sequence[Truncation]) -> None:
    """Set the logits that each row's truncation excludes to -inf, in both tensors, in place."""
    for index, cut in enumerate(cuts):
        if cut.is_active:
            truncate_row(scaled_BV[index], cut)
            if scaled_BV is not logits_BV:
                logits_BV[index].masked_fill_(scaled_BV[index] == -torch.inf, -torch.inf)


def truncate_row(logits_V: Tensor, cut: Truncation) -> None:
    """Apply top-k, then top-p of the rest, then min-p to one tempered row, in place. The lowest id wins a tie."""
    vocab_size = logits_V.size(0)
    num_top = min(cut.top_k or vocab_size, vocab_size)
    best = logits_V.max()
    if num_top < vocab_size or cut.top_p < 1:
        value_K = _best_values(logits_V, num_top, cut.top_p)
        count = min(num_top, value_K.size(0))
        if cut.top_p < 1:
            mass_K = (value_K.double() - best.double()).exp().cumsum(-1)
            total = mass_K[count - 1] if count == num_top < vocab_size else _mass(logits_V, best)
            count = int((mass_K[:count] < cut.top_p * total).sum()) + 1
        keep_best(logits_V, value_K[: min(count, num_top)])
    if cut.min_p > 0:
        logits_V[(logits_V.double() - best.double()).exp() < cut.min_p] = -torch.inf


def _best_values(logits_V: Tensor, num_top: int, top_p: float) -> Tensor:
    """Return the largest values, sorted: at least as many as top-k and top-p need."""
    if num_top < logits_V.size(0):
        return logits_V.topk(num_top).values
    width = min(_TOP_P_WIDTH, num_top)
    value_K = logits_V.topk(width).values
    best = value_K[0]
    if width == num_top or (value_K.double() - best.double()).exp().sum() >= top_p * _mass(logits_V, best):
        return value_K
    return logits_V.sort(descending=True).values


def _mass(logits_V: Tensor, best: Tensor) -> Tensor:
    return (logits_V.double() - best.double()).exp().sum()


def keep_best(logits_V: Tensor, best_K: Tensor) -> None:
    """Keep the len(best_K) largest logits, whose sorted values are `best_K`; lowest ids first among equals."""
    last = best_K[-1]
    num_equal = int((best_K == last).sum())
    equal_V = logits_V == last
    if int(equal_V.sum()) > num_equal:
        equal_V &= equal_V.cumsum(0) <= num_equal
    logits_V.masked_fill_(~((logits_V > last) | equal_V), -torch.inf)
