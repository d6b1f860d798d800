"""Rows of logits on which sums of exponentials lose accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHAPES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": lambda rows, vocab, rng: torch.randn(rows, vocab, generator=rng) * torch.linspace(0.5, 5, rows)[:, None],
    "heavy-tailed": lambda rows, vocab, rng: (
        torch.randn(rows, vocab, generator=rng) / torch.rand(rows, vocab, generator=rng).clamp(1e-3).sqrt()
    ),
    "flat": lambda rows, vocab, rng: torch.randn(rows, 1, generator=rng).mul(9).expand(rows, vocab).clone(),
    "nearly flat": lambda rows, vocab, rng: torch.randn(rows, vocab, generator=rng) * 1e-3 + 7,
    "flat with a peak": lambda rows, vocab, rng: _peak(torch.linspace(2, 16, rows), vocab, rng),
    "one-hot": lambda rows, vocab, rng: _peak(torch.full((rows,), 2e4), vocab, rng),
    "far from 0": lambda rows, vocab, rng: torch.randn(rows, vocab, generator=rng) * 3 + 1000,
}


def _peak(height_B: Tensor, vocab_size: int, rng: torch.Generator) -> Tensor:
    """Equal logits, and one that is higher by `height_B`: the rounding of that difference is the same for all."""
    logits_BV = torch.randn(height_B.size(0), 1, generator=rng).expand(-1, vocab_size).clone()
    logits_BV[:, vocab_size // 3] += height_B
    return logits_BV


def shaped(name: str, num_rows: int, vocab_size: int) -> Tensor:
    """Return float32 logits [num_rows, vocab_size] of one of the shapes, the same at each call."""
    return SHAPES[name](num_rows, vocab_size, torch.Generator().manual_seed(vocab_size))
