"""Parts of weights: each rank reads only its own values from files and tensors."""

from __future__ import annotations

from collections.abc import Mapping

from nano_inference.loader.gguf import PackedTensor
from nano_inference.loader.pieces import FileRange
from nano_inference.loader.sources import TensorSource, WeightSource
from nano_inference.parallel.shard import Cut, Shard


def part_of(source: WeightSource, cut: Cut | None) -> WeightSource:
    """Return the part of a weight; without a cut, the weight itself.

    Raises `TypeError` for a kind of source that cannot be divided (one of a plugin's format).
    """
    if cut is None:
        return source
    if isinstance(source, TensorSource):
        return TensorSource(source.tensor.narrow(cut.axis, cut.start, cut.stop - cut.start))
    if isinstance(source, FileRange | PackedTensor):
        return source.rows(cut.start, cut.stop) if cut.axis == 0 else source.columns(cut.start, cut.stop)
    raise TypeError(f"tensor_parallel: weights of the kind {type(source).__name__} cannot be divided")


def parts_of(sources: Mapping[str, WeightSource], part: Shard) -> dict[str, WeightSource]:
    """Return a rank's part of every weight that it has."""
    own = {spec.name for spec in part.program.weights}
    return {name: part_of(source, part.cuts.get(name)) for name, source in sources.items() if name in own}
