"""Adapters of a divided model: the part of each rank, and how rank 0 sends it.

A matrix that is cut by rows has A whole and B by rows; one that is cut by columns has A by columns and B whole, and the
`Reduce` after it adds the ranks' parts.

Shapes: R ranks of an adapter, N outputs and K inputs of a rank's part of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.loading.adapters import Adapter, LowRank
from nano_inference.loading.pieces import DTYPES
from nano_inference.loading.sources import TensorSource
from nano_inference.models.ops import WeightSpec
from nano_inference.parallel.links import Group
from nano_inference.parallel.shard import Cut, Shard
from nano_inference.parallel.staged import part_of

About = tuple[str, str, int, float]
"""Name, dtype, ranks and scale of a pair, as rank 0 announces it."""


class StagedAdapter(NamedTuple):
    """An adapter that rank 0 has staged, and the other ranks not yet."""

    whole: Adapter
    own: object


def announced(adapter: Adapter) -> list[About]:
    """Return what other ranks need to know before they receive their part."""
    return [
        (name, str(pair.a_RK.dtype).removeprefix("torch."), pair.a_RK.size(0), pair.scale)
        for name, pair in adapter.pairs.items()
    ]


def adapter_part(adapter: Adapter, part: Shard) -> Adapter:
    """Return one rank's part of an adapter."""
    pairs = {name: _part(pair, part.cuts.get(name)) for name, pair in adapter.pairs.items()}
    return _of_pairs(pairs)


def send_part(adapter: Adapter, group: Group, rank: int) -> None:
    """Send a rank its part, in one message."""
    values = (one.contiguous().view(torch.uint8).flatten() for pair in adapter.pairs.values() for one in pair[:2])
    group.send(torch.cat([*values]), rank)


def receive_part(about: list[About], specs: Mapping[str, WeightSpec], group: Group) -> Adapter:
    """Return this rank's part, which rank 0 sends."""
    shapes = [(shape, DTYPES[dtype]) for name, dtype, rank, _ in about for shape in _shapes(specs[name], rank)]
    sizes = [shape[0] * shape[1] * dtype.itemsize for shape, dtype in shapes]
    data = torch.split(group.receive(torch.empty(sum(sizes), dtype=torch.uint8), 0), sizes)
    # A copy, because an offset in the message need not be a multiple of the size of a value.
    values = [one.clone().view(dtype).view(shape) for one, (shape, dtype) in zip(data, shapes, strict=True)]
    pairs = zip(about, values[::2], values[1::2], strict=True)
    return _of_pairs({name: LowRank(a_RK, b_NR, scale) for (name, _, _, scale), a_RK, b_NR in pairs})


def _shapes(spec: WeightSpec, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    num_out, num_in = spec.shape
    return (rank, num_in), (num_out, rank)


def _part(pair: LowRank, cut: Cut | None) -> LowRank:
    if cut is None:
        return pair
    if cut.axis == 0:
        return pair._replace(b_NR=_cut(pair.b_NR, cut))
    return pair._replace(a_RK=_cut(pair.a_RK, cut))


def _cut(tensor: Tensor, cut: Cut) -> Tensor:
    source = part_of(TensorSource(tensor), cut)
    assert isinstance(source, TensorSource)
    return source.tensor


def _of_pairs(pairs: Mapping[str, LowRank]) -> Adapter:
    size = sum(one.nbytes for pair in pairs.values() for one in pair[:2])
    return Adapter(pairs=pairs, rank=max(pair.a_RK.size(0) for pair in pairs.values()), num_bytes=size)
