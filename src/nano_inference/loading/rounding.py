"""Measures how much weights change when they are rounded to the precision of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.loading.pieces import DTYPES
from nano_inference.loading.sources import WeightSource


@dataclass(slots=True)
class RoundingError:
    """Sums over all weights that were read so far."""

    dtype: torch.dtype
    squares: float = 0.0  # of the weights
    errors: float = 0.0  # squares of the differences

    @property
    def relative(self) -> float:
        """Return the root of the mean square of the errors, relative to that of the weights."""
        return float((self.errors / self.squares) ** 0.5) if self.squares else 0.0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"dequantised weights are rounded to {name}: relative error {self.relative:.2g} (root mean square)"


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    """A quantised weight whose rounding is measured when it is read; satisfies `WeightSource`."""

    source: WeightSource
    error: RoundingError

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, target: Tensor) -> None:
        """Fill a contiguous tensor of the same shape; needs a float32 copy of it meanwhile."""
        exact = torch.empty(self.shape, dtype=torch.float32)
        self.source.read_into(exact)
        self.error.squares += float(exact.double().square().sum())
        self.error.errors += float((exact.to(target.dtype).float() - exact).double().square().sum())
        target.copy_(exact)


def measured_sources(
    sources: Mapping[str, WeightSource], dtype: torch.dtype
) -> tuple[Mapping[str, WeightSource], RoundingError]:
    """Return sources that measure how quantised weights are rounded to `dtype`, and where the result will be."""
    error = RoundingError(dtype)
    if dtype == torch.float32:
        return sources, error
    return {
        name: source if source.dtype in DTYPES else MeasuredSource(source, error) for name, source in sources.items()
    }, error
