"""Reads ranges of files into tensors, in bounded pieces.

Files are not memory-mapped: mapped pages count as resident memory, and truncating a mapped file kills the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from nano_inference.support.files import open_regular
from nano_inference.types import ModelError

PIECE_BYTES = 8 * 2**20

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Dtypes whose file contents are plain little-endian values."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A tensor of plain values in a file; satisfies `WeightSource`."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str  # a key of `DTYPES`
    stride: int | None = None  # bytes from one row to the next in the file; None if rows are adjacent

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def rows(self, start: int, stop: int) -> FileRange:
        """Return rows [start, stop)."""
        num_rows, *rest = self.shape
        stop = min(stop, num_rows)
        offset = self.offset + start * (self.stride or self.row_bytes)
        return replace(self, offset=offset, shape=(stop - start, *rest))

    def columns(self, start: int, stop: int) -> FileRange:
        """Return columns [start, stop) of a matrix."""
        num_rows, _ = self.shape
        offset = self.offset + start * DTYPES[self.dtype].itemsize
        return replace(self, offset=offset, shape=(num_rows, stop - start), stride=self.stride or self.row_bytes)

    def read_into(self, target: Tensor) -> None:
        """Fill a contiguous tensor of the same shape, of any float dtype, on any device."""
        if not math.prod(self.shape):
            return
        with open_at(self.path, self.offset) as file:
            if self.stride is None:
                self._read_values(file, target.view(-1))
                return
            for index, row in enumerate(target):
                file.seek(self.offset + index * self.stride)
                self._read_values(file, row)

    def _read_values(self, file: FileIO, flat: Tensor) -> None:
        dtype = DTYPES[self.dtype]
        if dtype == flat.dtype and flat.device.type == "cpu":
            fill(file, self.path, flat)
            return
        staging = torch.empty(min(flat.numel(), PIECE_BYTES // dtype.itemsize), dtype=dtype)
        for start in range(0, flat.numel(), max(1, staging.numel())):
            piece = flat[start : start + staging.numel()]
            fill(file, self.path, staging[: piece.numel()])
            piece.copy_(staging[: piece.numel()])


def is_finite(tensor: Tensor) -> bool:
    """Return False if any value is NaN or infinite. A minimum propagates NaN, so one pass suffices."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return float(low) > -torch.inf and float(high) < torch.inf


def open_at(path: Path, offset: int) -> FileIO:
    """Open a file unbuffered and seek to `offset`. Raises `ModelError`."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    file.seek(offset)
    return file


def fill(file: FileIO, path: Path, flat: Tensor) -> None:
    """Fill a contiguous CPU tensor from a file. Raises `ModelError` if the file ends early."""
    if not flat.numel():
        return
    memory = flat.view(torch.uint8).numpy().data
    done = 0
    while done < len(memory):
        try:
            num_read = file.readinto(memory[done:])
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        if not num_read:
            raise ModelError(f"{path}: ends {len(memory) - done} bytes early; was it changed while it was read?")
        done += num_read
