"""What the ranks of a divided model exchange inside a pass: partial sums (`Reduce`), and their parts of the logits.

Each exchange is a launch on fixed memory, which a CUDA graph can record. All ranks gather the logits of all ids: the
kernels of sampling compute the same on every rank.

Shapes: K ranks, T tokens of a pass, W width of a buffer, N values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nano_inference.models.ops import Embed, Linear, Op, Reduce


class Exchange(Protocol):
    """A group of ranks, which make the same calls in the same order. On a GPU they return before its work is done."""

    size: int

    def add_in_place(self, x: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks, with the same bits on each."""

    def gather_into(self, out: Tensor, x: Tensor) -> None:
        """Write the ranks' tensors of x's shape to out, one behind the other; both are contiguous."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks among which a program is divided."""

    exchange: Exchange
    part_size: int  # ids of each rank's logits; the last rank may have fewer


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The ranks, and memory for what they send."""

    ranks: Ranks
    gathered_N: Tensor
    padded_N: Tensor  # logits of a rank that has fewer ids

    @property
    def num_logits(self) -> int:
        """Return the ids of all ranks, as if the last had as many as the others."""
        return self.ranks.exchange.size * self.ranks.part_size

    def gathered(self, x_TW: Tensor) -> Tensor:
        """Return the ranks' tensors [K, T, W], in memory that the next call overwrites."""
        size = self.ranks.exchange.size
        found_KTW = self.gathered_N.narrow(0, 0, size * x_TW.numel()).view(size, *x_TW.shape)
        self.ranks.exchange.gather_into(found_KTW, x_TW)
        return found_KTW

    def padded(self, x_TW: Tensor) -> Tensor:
        """Return logits, filled up to the part's size with any values."""
        num_rows, width, size = *x_TW.shape, self.ranks.part_size
        if width == size and x_TW.is_contiguous():
            return x_TW
        own_TW = self.padded_N.narrow(0, 0, num_rows * size).view(num_rows, size)
        own_TW.narrow(1, 0, width).copy_(x_TW)
        return own_TW


def rank_memory(ranks: Ranks, num_values: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> RankMemory:
    """Allocate memory for sums of `num_values` values, and for the logits of `num_rows` rows."""
    num_logits = num_rows * ranks.part_size
    num_gathered = ranks.exchange.size * max(num_values, num_logits)
    gathered_N, padded_N = (torch.zeros(size, dtype=dtype, device=device) for size in (num_gathered, num_logits))
    return RankMemory(ranks, gathered_N, padded_N)


def sum_width(part: Sequence[Op]) -> int:
    """Return the width of the widest buffer that a part of a program adds over the ranks."""
    widths: dict[str, int] = {}
    widest = 0
    for op in part:
        if isinstance(op, Embed):
            widths[op.out] = op.table.shape[1]
        elif isinstance(op, Linear):
            widths |= zip(op.out, op.widths, strict=True)
        elif isinstance(op, Reduce):
            widest = max(widest, widths[op.x])
    return widest
