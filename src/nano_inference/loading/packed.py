"""Tensors of GGUF files that are dequantised, shifted or put in another order when they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import FileIO
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from nano_inference.loading.gguf_file import PLAIN, GgufTensor
from nano_inference.loading.pieces import fill, open_at

PIECE_VALUES = 2**20  # most values that are dequantised at a time, but at least a row


@dataclass(frozen=True, slots=True)
class Exchanged:
    """An order of rows or columns: from `start` on, the file's are a table of which a weight exchanges axes 1 and 2."""

    table: tuple[int, int, int, int]  # one of them -1: the rest
    start: int = 0

    def places(self, size: int) -> Tensor:
        """Return the place in the file of each of a weight's rows or columns, int64 [size]."""
        places = torch.arange(size)
        table = places[self.start :].view(self.table).transpose(1, 2).reshape(-1)
        return torch.cat((places[: self.start], table))


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of a GGUF file that must be dequantised or changed; satisfies `WeightSource`."""

    path: Path
    tensor: GgufTensor
    row_order: Exchanged | None = None  # None: the file's
    column_order: Exchanged | None = None
    shift: float = 0.0  # added to every value
    row_range: range | None = None
    """The rows of the weight that this source reads; None: all."""
    column_range: range | None = None
    piece_values: int = PIECE_VALUES

    @property
    def shape(self) -> tuple[int, ...]:
        ranges = (self.row_range, self.column_range, *(None,) * len(self.tensor.shape))
        sizes = zip(self.tensor.shape, ranges, strict=False)
        return tuple(size if part is None else len(part) for size, part in sizes)

    def rows(self, start: int, stop: int) -> PackedTensor:
        """Return rows [start, stop)."""
        return replace(self, row_range=(self.row_range or range(self.tensor.shape[0]))[start:stop])

    def columns(self, start: int, stop: int) -> PackedTensor:
        """Return columns [start, stop) of a matrix."""
        assert len(self.tensor.shape) == 2 and self.column_range is None
        return replace(self, column_range=range(start, stop))

    @property
    def dtype(self) -> str:
        """Return ggml's type name, such as "Q4_1", or the dtype of plain values."""
        return PLAIN.get(self.tensor.type_name, self.tensor.type_name)

    def read_into(self, target: Tensor) -> None:
        """Fill a contiguous tensor of the same shape, any float dtype and device, in bounded pieces."""
        rows = self._rows()
        with open_at(self.path, self.tensor.offset) as file:
            if len(self.tensor.shape) == 1:  # one row of blocks
                packed = torch.empty(1, self.tensor.num_bytes, dtype=torch.uint8)
                fill(file, self.path, packed.view(-1))
                target.copy_(unpack(packed, self.tensor.type_name)[rows] + self.shift)
                return
            lines = target.view(len(rows), -1)
            rows, places = rows.sort()
            step = max(1, self.piece_values // lines.size(1))
            for start in range(0, len(rows), step):
                values, at = self._read(file, rows[start : start + step]), places[start : start + step]
                lines.index_copy_(0, at.to(lines.device), (values + self.shift if self.shift else values).to(lines))

    def _read(self, file: FileIO, rows: Tensor) -> Tensor:
        """Return the values [row, column] of ascending rows of the file: only blocks with columns of this source."""
        from nano_inference.loading.ggml import block_layout

        block, block_bytes = block_layout(self.tensor.type_name)
        width = self.tensor.row_bytes // block_bytes * block
        columns = self.column_range or range(width)
        first, last = 0, width // block
        if self.column_range is not None and self.column_order is None:
            first, last = columns.start // block, -(-columns.stop // block)
        packed = self._bytes(file, rows, first * block_bytes, last * block_bytes)
        values = unpack(packed, self.tensor.type_name).view(len(rows), -1)
        if self.column_order is not None:
            values = values[:, self.column_order.places(width)]
        return values[:, columns.start - first * block : columns.stop - first * block]

    def read_blocks(self) -> tuple[Tensor, Tensor | None]:
        """Return the file's rows, uint8 [rows, bytes], and the file row of each row of the weight (None: the same).

        Only for two-dimensional tensors without a shift; columns are moved in whole blocks.
        """
        from nano_inference.loading.ggml import block_layout

        assert not self.shift and len(self.shape) == 2 and self.column_range is None
        rows, places = self._rows().sort()
        with open_at(self.path, self.tensor.offset) as file:
            packed = self._bytes(file, rows, 0, self.tensor.row_bytes)
        if self.column_order is not None:
            blocks = packed.view(len(rows), -1, block_layout(self.tensor.type_name)[1])
            packed = blocks[:, self.column_order.places(blocks.size(1))].view(len(rows), -1)
        return packed, None if self.row_order is None else places.argsort().int()

    def _rows(self) -> Tensor:
        """Return the file row of each row of this source."""
        size = self.tensor.shape[0]
        rows = torch.arange(size) if self.row_order is None else self.row_order.places(size)
        return rows if self.row_range is None else rows[self.row_range.start : self.row_range.stop]

    def _bytes(self, file: FileIO, rows: Tensor, first: int, last: int) -> Tensor:
        """Return bytes [first, last) of ascending rows of the file, adjacent whole ones in one read."""
        packed = torch.empty(len(rows), last - first, dtype=torch.uint8)
        is_whole = last - first == self.tensor.row_bytes
        gaps = (rows.diff() != 1).nonzero().view(-1) + 1 if is_whole else torch.arange(1, len(rows))
        for start, stop in pairwise((0, *gaps.tolist(), len(rows))):
            file.seek(self.tensor.offset + int(rows[start]) * self.tensor.row_bytes + first)
            fill(file, self.path, packed[start:stop].view(-1))
        return packed


def unpack(packed: Tensor, type_name: str) -> Tensor:
    """Return the float32 values of rows of bytes, flattened."""
    from nano_inference.loading.ggml import dequantize  # `read_gguf` has checked that `gguf` is installed

    return torch.from_numpy(dequantize(packed.numpy(), type_name)).view(-1)
