"""Adapters in torch: s · (x Aᵀ) Bᵀ added to the rows of a projection that have one.

Shapes: R rows of one adapter, T tokens of a step, N outputs and K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.loading.adapters import Adapter, LowRank
from nano_inference.models.ops import Linear

Pairs = Mapping[str, LowRank]  # by the weight's name


class Group(NamedTuple):
    """The rows of one adapter in a step."""

    row_R: Tensor
    pairs: Pairs


def moved(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Return an adapter's pairs in new memory on a device."""
    return {
        name: LowRank(pair.a_RK.to(device, dtype, copy=True), pair.b_NR.to(device, dtype, copy=True), pair.scale)
        for name, pair in adapter.pairs.items()
    }


def groups_of(numbers: Sequence[int], adapters: Mapping[int, Pairs], device: torch.device) -> list[Group]:
    """Return the rows of each adapter from the number of each row's, 0 for none."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        if number:
            rows.setdefault(number, []).append(row)
    return [Group(torch.tensor(rows[number], device=device), adapters[number]) for number in sorted(rows)]


def add_adapters(out_TN: Tensor, x_TK: Tensor, op: Linear, groups: Sequence[Group]) -> None:
    """Add to a projection's outputs what its rows' adapters have for its matrices."""
    starts = accumulate(op.widths, initial=0)
    for spec, start, width in zip(op.matrices, starts, op.widths, strict=False):
        for row_R, pairs in groups:
            if spec.name in pairs:
                a_LK, b_NL, scale = pairs[spec.name]
                low_RL = functional.linear(x_TK[row_R], a_LK) * scale
                out_TN[:, start : start + width].index_add_(0, row_R, functional.linear(low_RL, b_NL[:width]))
