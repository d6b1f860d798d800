"""Shared by all executors for weight updates: splitting tensors into pieces, and checks of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from nano_inference.loading.pieces import FileRange
from nano_inference.loading.sources import TensorSource, WeightSource

Pace = Callable[[int], None]
"""Called with the bytes of the next piece; blocks until it may be processed. Raises if the update was cancelled."""

SMALL_PIECE = 32768  # elements processed at a time while steps run: torch uses a single thread for so few


class NotFinite(Exception):
    """A weight contains NaN or infinity in the stored precision, which is the exception's text."""


def pieces_of(shape: tuple[int, ...], itemsize: int, pace: Pace | None, elements: int = SMALL_PIECE) -> Iterator[slice]:
    """Yield slices of a tensor's rows: all rows, or, with a pace, about `elements` elements at a time."""
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
    """Return rows [start, stop) of a tensor or a file range."""
    if isinstance(source, TensorSource):
        return TensorSource(source.tensor[start:stop])
    assert isinstance(source, FileRange)
    return source.rows(start, stop)


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's precision, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
