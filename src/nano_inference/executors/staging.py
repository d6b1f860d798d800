"""What filling the next weights has in common on every executor: pieces at a pace, and checks of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nano_inference.loader.pieces import FileRange
from nano_inference.loader.sources import TensorSource, WeightSource

Pace = Callable[[int], None]
"""Called with the bytes of the next piece; returns when it may be processed, raises when the update was cancelled."""

SMALL_PIECE = 32768
"""Elements copied or packed at once beside running steps: torch works on so few without a second thread."""


class NotFinite(Exception):
    """A weight holds NaN or infinity in the precision that the engine keeps, which is the exception's text."""


def pieces_of(shape: tuple[int, ...], itemsize: int, pace: Pace | None, elements: int = SMALL_PIECE) -> Iterator[slice]:
    """Yield the rows of a tensor of at least one dimension: all, or, at a pace, about so many elements at a time."""
    rows, numel = shape[0], math.prod(shape)
    if pace is None or not numel:
        yield slice(0, rows)
        return
    step = max(1, elements * rows // numel)
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        pace((piece.stop - piece.start) * (numel // rows) * itemsize)
        yield piece


def rows_of(source: WeightSource, start: int, stop: int) -> WeightSource:
    """Return some rows of a source, where it can be cut."""
    if isinstance(source, TensorSource):
        return TensorSource(source.tensor[start:stop])
    assert isinstance(source, FileRange)
    return source.rows(start, stop)


def is_finite(tensor: Tensor) -> bool:
    """Return False if a value is NaN or infinite. NaN passes through a minimum, so one pass is enough."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return float(low) > -torch.inf and float(high) < torch.inf


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's precision, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
