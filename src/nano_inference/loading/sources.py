"""Weights that can be read from a file or from memory; checks of names and shapes, and the error of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nano_inference.loading.pieces import DTYPES, PIECE_BYTES, FileRange
from nano_inference.models.names import NameRules
from nano_inference.types import ModelError

_SHOWN_NAMES = 5


class WeightSource(Protocol):
    """A tensor that can be read repeatedly, from a file or from memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """Return the stored type: "float32", "bfloat16", "Q4_1", …"""

    def read_into(self, target: Tensor) -> None:
        """Fill a contiguous tensor of this shape, any float dtype and device.

        Values are converted in bounded pieces. Raises `ModelError` if the file cannot be read.
        """


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor in memory; satisfies `WeightSource`."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def read_into(self, target: Tensor) -> None:
        target.copy_(self.tensor)


def same_values(one: WeightSource, other: WeightSource) -> bool:
    """Return whether two weights are equal as float32; files are read in pieces, up to the first difference."""
    if one.shape != other.shape:
        return False
    return all(torch.equal(a, b) for a, b in zip(_pieces(one), _pieces(other), strict=True))


def _pieces(source: WeightSource) -> Iterator[Tensor]:
    """Yield a weight's values as float32, a file's some rows at a time."""
    size = source.shape[0] if source.shape else 1
    step = size
    if isinstance(source, FileRange) and source.shape:
        step = max(1, PIECE_BYTES // max(1, 4 * math.prod(source.shape[1:])))
    for start in range(0, size, max(1, step)):
        part = source.rows(start, start + step) if isinstance(source, FileRange) and step < size else source
        values = torch.empty(part.shape)
        part.read_into(values)
        yield values


@torch.no_grad()
def load_into(slots: Mapping[str, Tensor], named: Iterable[tuple[str, WeightSource]]) -> None:
    """Fill every slot, a contiguous tensor, from the source with the same name.

    Raises `ModelError` as `check_names` does, before anything is written.
    """
    sources = dict(named)
    check_names({name: tuple(slot.shape) for name, slot in slots.items()}, sources)
    for name, source in sources.items():
        source.read_into(slots[name])


def own_sources(
    sources: Mapping[str, WeightSource], names: NameRules, origin: str
) -> tuple[dict[str, WeightSource], dict[str, WeightSource]]:
    """Return a program's weights by its names, and the ignored ones by those of the files.

    Raises `ModelError` if two of them have the same name in the program.
    """
    kept: dict[str, WeightSource] = {}
    ignored: dict[str, WeightSource] = {}
    for name, source in sources.items():
        own = names.own(name)
        if own in kept:
            raise ModelError(f"{origin}: has two tensors for {own}, one of them is {name}")
        if own is None:
            ignored[name] = source
        else:
            kept[own] = source
    return kept, ignored


def exchanged_heads(tensor: Tensor, place: tuple[int, int], rows: int, num_heads: int) -> Tensor:
    """Exchange rows and columns of a table of heads, which follow each other on an axis."""
    axis, start = place
    first, heads = tensor.narrow(axis, 0, start), tensor.narrow(axis, start, tensor.size(axis) - start)
    before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
    table = heads.reshape(*before, rows, num_heads // rows, -1, *after).transpose(axis, axis + 1)
    return torch.cat((first, table.flatten(axis, axis + 2)), dim=axis)


def check_names(shapes: Mapping[str, tuple[int, ...]], named: Mapping[str, WeightSource]) -> None:
    """Raise `ModelError` if names or shapes differ from those of the model."""
    for name, source in named.items():
        if name not in shapes:
            raise ModelError(f"the checkpoint has {name}, which the model does not have")
        if shapes[name] != source.shape:
            raise ModelError(f"{name}: the checkpoint has the shape {source.shape}, the model {shapes[name]}")
    missing = [name for name in shapes if name not in named]
    if missing:
        rest = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:_SHOWN_NAMES])}{rest}")


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

    def measured(self, values: Tensor) -> Tensor:
        """Return the float32 values of a weight, after adding them to the sums."""
        self.squares += float(values.double().square().sum())
        self.errors += float((values.to(self.dtype).float() - values).double().square().sum())
        return values

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"dequantised weights are rounded to {name}: relative error {self.relative:.2g} (root mean square)"


@dataclass(frozen=True, slots=True)
class MappedSource:
    """A weight whose values are those that a function returns for float32 ones; satisfies `WeightSource`."""

    source: WeightSource
    change: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, target: Tensor) -> None:
        """Fill a contiguous tensor of the same shape; needs a float32 copy of it meanwhile."""
        values = torch.empty(self.shape, dtype=torch.float32)
        self.source.read_into(values)
        target.copy_(self.change(values))


def measured_sources(
    sources: Mapping[str, WeightSource], dtype: torch.dtype
) -> tuple[Mapping[str, WeightSource], RoundingError]:
    """Return sources that measure how quantised weights are rounded to `dtype`, and where the result will be."""
    error = RoundingError(dtype)
    if dtype == torch.float32:
        return sources, error
    return {
        name: source if source.dtype in DTYPES else MappedSource(source, error.measured)
        for name, source in sources.items()
    }, error
