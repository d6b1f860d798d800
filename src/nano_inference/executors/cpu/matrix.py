"""Packs weights for the kernels: unchanged (float32, bfloat16, float16, ggml blocks) or rounded to eight bits.

Shapes: N outputs (rows in the checkpoint), K inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cpu.library import BF16, F16, F32, INT8, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, Library
from nano_inference.support.memory import Slabs

GGML: Mapping[str, int] = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q6_K": Q6_K}
"""ggml types that have a kernel, by name."""
PLAIN: Mapping[torch.dtype, int] = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_DTYPE_OF: Mapping[int, torch.dtype] = {kind: dtype for dtype, kind in PLAIN.items()}
_NIBBLES = ("Q4_0", "Q4_1", "Q4_K")
_BLOCK_INPUTS: Mapping[int, int] = {Q4_0: 32, Q4_1: 32, Q8_0: 32, Q4_K: 256, Q6_K: 256}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One packed matrix [N, K]."""

    format: int
    num_out: int
    num_in: int
    packed: Tensor  # uint8, aligned to 64 bytes; c/formats.h documents the layout
    rounds: bool = False  # True if activations are rounded to eight bits before the product
    by_rows: bool = False
    """True if the rows are stored as they are, not in panels: a table of which only single rows are read."""

    @property
    def num_bytes(self) -> int:
        return self.packed.numel()


def can_keep(type_name: str, num_in: int) -> bool:
    """Return True if a ggml type has a kernel for rows of `num_in` values."""
    return type_name in GGML and num_in % _BLOCK_INPUTS[GGML[type_name]] == 0


def can_round(type_name: str, num_in: int) -> bool:
    """Return True if a ggml type also has a kernel for eight-bit activations."""
    return type_name in _NIBBLES and can_keep(type_name, num_in)


def pack_blocks(
    library: Library,
    type_name: str,
    rows: Tensor,
    num_in: int,
    slabs: Slabs,
    order_N: Tensor | None = None,
    *,
    rounds: bool = False,
) -> Matrix:
    """Pack rows of ggml blocks (uint8 [N, bytes]); `order_N` (int32) gives the source row of each output."""
    assert not rounds or can_round(type_name, num_in)
    kind, num_out = GGML[type_name], rows.size(0)
    packed = slabs.take(library.code.nano_packed_bytes(kind, num_out, num_in))
    order = None if order_N is None else order_N.data_ptr()
    library.code.nano_pack(kind, rows.contiguous().data_ptr(), order, 0, num_out, num_in, packed.data_ptr())
    return Matrix(kind, num_out, num_in, packed, rounds)


def unpack(library: Library, matrix: Matrix, first: int = 0, count: int | None = None) -> Tensor:
    """Return rows [first, first + count) as float32, the exact values that the kernels use."""
    count = matrix.num_out - first if count is None else count
    if matrix.format == INT8:
        weight_NK, scale_N = (part[first : first + count] for part in int8_parts(matrix))
        return weight_NK.float() * scale_N.unsqueeze(-1)
    values_NK = torch.empty(count, matrix.num_in)
    if matrix.by_rows:
        return values_NK.copy_(_rows_of(matrix)[first : first + count])
    packed = matrix.packed.data_ptr()
    library.code.nano_unpack(matrix.format, packed, first, count, matrix.num_in, values_NK.data_ptr())
    return values_NK


def int8_parts(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Return the int8 values [N, K] and the scales [N] of an eight-bit matrix."""
    num_panels, groups = -(-matrix.num_out // 64), -(-matrix.num_in // 4)
    size = num_panels * groups * 256
    bytes_PGNJ = matrix.packed[:size].view(torch.int8).view(num_panels, groups, 64, 4)
    weight_NK = bytes_PGNJ.permute(0, 2, 1, 3).reshape(num_panels * 64, groups * 4)
    return weight_NK[: matrix.num_out, : matrix.num_in], matrix.packed[size:].view(torch.float32)[: matrix.num_out]


def _rows_of(matrix: Matrix) -> Tensor:
    return matrix.packed.view(_DTYPE_OF[matrix.format]).view(matrix.num_out, matrix.num_in)


class Packer:
    """Owns a matrix while it is packed from plain values, a range of rows at a time."""

    def __init__(
        self,
        library: Library,
        weight_NK: Tensor,
        slabs: Slabs,
        kind: int,
        spare: Matrix | None = None,
        *,
        by_rows: bool = False,
    ) -> None:
        """Pack to format `kind`: that of the values, BF16 for float32 values that fit it, or INT8, which rounds.

        The memory of an unused `spare` matrix of the same layout is reused; its padding is already zero. `by_rows`
        applies to plain formats; INT8 always has panels.
        """
        assert weight_NK.is_contiguous() and weight_NK.dtype in PLAIN
        self._library = library
        self._source_NK = weight_NK
        num_out, num_in = weight_NK.shape
        by_rows = by_rows and kind != INT8
        layout = (kind, num_out, num_in, by_rows)
        if spare is not None and (spare.format, spare.num_out, spare.num_in, spare.by_rows) == layout:
            packed = spare.packed
        elif by_rows:
            packed = slabs.take(num_out * num_in * _DTYPE_OF[kind].itemsize)
        else:
            packed = slabs.take(library.code.nano_packed_bytes(kind, num_out, num_in))
        self.matrix = Matrix(kind, num_out, num_in, packed, rounds=kind == INT8, by_rows=by_rows)

    def put(self, start: int, stop: int) -> None:
        """Pack rows [start, stop)."""
        m, code, count = self.matrix, self._library.code, stop - start
        rows, target = self._source_NK[start:stop], m.packed.data_ptr()
        if m.by_rows:
            _rows_of(m)[start:stop] = rows
        elif m.format == INT8:
            code.nano_pack_int8(rows.float().data_ptr(), start, count, m.num_out, m.num_in, target)
        elif m.format == BF16 and rows.dtype == torch.float32:
            code.nano_pack_short(rows.data_ptr(), start, count, m.num_in, target)
        else:
            code.nano_pack(m.format, rows.data_ptr(), None, start, count, m.num_in, target)


class Scan(NamedTuple):
    """Result of `scan`."""

    is_finite: bool
    fits_bfloat16: bool  # True if all values are exact in bfloat16; always True for narrower dtypes


def scan(library: Library, values: Tensor) -> Scan:
    """Check contiguous float32, bfloat16 or float16 values in one pass."""
    assert values.is_contiguous()
    found = library.code.nano_scan(PLAIN[values.dtype], values.data_ptr(), values.numel())
    return Scan(is_finite=not found & 1, fits_bfloat16=not found & 2)
