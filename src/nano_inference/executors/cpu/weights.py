"""The CPU kernels' weights while they are filled: each is packed straight from its source.

Shapes: N outputs and K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Literal, TypeVar

import torch
from torch import Tensor

from nano_inference.executors.cpu.lower import CpuWeights
from nano_inference.executors.staging import NotFinite, Pace, pieces_of, rows_of
from nano_inference.kernels.library import BF16, INT8, Library
from nano_inference.kernels.matrix import (
    PLAIN,
    Matrix,
    Packer,
    can_keep,
    can_round,
    format_of,
    pack_blocks,
    scan,
    unpack,
)
from nano_inference.loader.door import TensorSource, WeightSource
from nano_inference.loader.gguf import PackedTensor
from nano_inference.loader.pieces import DTYPES
from nano_inference.memory import Slabs
from nano_inference.models.ops import WeightSpec

Rounding = Literal["own", "bfloat16", "int8"]
"""How weights are kept: as they come, or rounded."""
Model = TypeVar("Model")


class CpuStaged:
    """Owns the next weights while they are packed; a weight that does not come stays as it is packed now."""

    def __init__(
        self,
        library: Library,
        rounding: Rounding,
        live: CpuWeights | None,
        finish: Callable[[CpuWeights], Model],
        spare: dict[str, Matrix],
        pace: Pace | None,
        *,
        check_finite: bool,
    ) -> None:
        """`finish` makes what the executor commits of complete weights.

        `spare` are matrices that nothing computes with; their memory is used first.
        """
        self._library, self._rounding, self._live = library, rounding, live
        self._finish, self._spare, self._pace, self._check_finite = finish, spare, pace, check_finite
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._slabs = Slabs()

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        """Pack one weight; return the bytes kept. Raises `NotFinite` where values are checked."""
        if spec.kind == "matrix":
            matrix = self._matrices[spec.name] = self._matrix(source, self._slabs, self._spare.pop(spec.name, None))
            return matrix.num_bytes
        vector = self._vectors[spec.name] = self._vector(spec, source)
        return vector.nbytes

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        """Whether a weight that was put is, as it is packed, that of another source."""
        if spec.kind != "matrix":
            return torch.equal(self._vectors[spec.name], self._vector(spec, source))
        first, again = self._matrices[spec.name], self._matrix(source, Slabs())
        return first.format == again.format and torch.equal(first.packed, again.packed)

    def finish(self) -> object:
        """Return what came and what is in force for the rest, ready to compute with."""
        live = self._live or CpuWeights({}, {})
        matrices = MappingProxyType({**live.matrices, **self._matrices})
        return self._finish(CpuWeights(matrices, MappingProxyType({**live.vectors, **self._vectors})))

    def _matrix(self, source: WeightSource, slabs: Slabs, spare: Matrix | None = None) -> Matrix:
        """Pack one matrix: ggml's blocks as they are where they can be, plain values, or rounded ones."""
        if isinstance(source, PackedTensor) and self._keeps_blocks(source):
            rows, order = source.read_blocks()
            name, num_in = source.tensor.type_name, source.shape[1]
            return pack_blocks(self._library, name, rows, num_in, slabs, order, rounds=self._rounding == "int8")
        weight_NK = self._values(source)
        packer = Packer(self._library, weight_NK, slabs, self._format(weight_NK), spare)
        for piece in self._pieces(weight_NK):
            packer.put(piece.start, piece.stop)
        return packer.matrix

    def _keeps_blocks(self, source: PackedTensor) -> bool:
        """Whether a tensor of ggml's blocks stays as the file has it."""
        can = {"own": can_keep, "int8": can_round}.get(self._rounding)
        return can is not None and not source.shift and can(source.tensor.type_name, source.shape[1])

    def _format(self, weight_NK: Tensor) -> int:
        """Return how plain values are packed, after looking through them as far as that is needed."""
        if self._check_finite:
            scans = [scan(self._library, weight_NK[piece]) for piece in self._pieces(weight_NK)]
            if not all(found.is_finite for found in scans):
                raise NotFinite(self._name)
            if self._rounding == "own" and weight_NK.dtype == torch.float32 and all(s.fits_bfloat16 for s in scans):
                return BF16
        elif self._rounding == "own":
            return format_of(self._library, weight_NK)
        return INT8 if self._rounding == "int8" else PLAIN[weight_NK.dtype]

    def _vector(self, spec: WeightSpec, source: WeightSource) -> Tensor:
        """Read a norm, a bias or numbers as float32, rounded to bfloat16 first where weights are."""
        rounds = self._rounding == "bfloat16" and spec.kind == "vector"
        values = torch.empty(source.shape, dtype=torch.bfloat16 if rounds else torch.float32)
        source.read_into(values)
        if self._check_finite and not scan(self._library, values).is_finite:
            raise NotFinite(self._name)
        return values.float()

    def _values(self, source: WeightSource) -> Tensor:
        """Return a matrix as contiguous plain values: the source's own memory where that serves."""
        dtype = torch.bfloat16 if self._rounding == "bfloat16" else own_dtype(source)
        if isinstance(source, TensorSource):
            tensor = source.tensor
            if tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
                return tensor
        weight_NK = torch.empty(source.shape, dtype=dtype)
        if isinstance(source, PackedTensor):
            source.read_into(weight_NK)
            return weight_NK
        for piece in self._pieces(weight_NK):
            rows_of(source, piece.start, piece.stop).read_into(weight_NK[piece])
        return weight_NK

    def _pieces(self, weight_NK: Tensor) -> Iterator[slice]:
        return pieces_of(tuple(weight_NK.shape), weight_NK.element_size(), self._pace)

    @property
    def _name(self) -> str:
        return "bfloat16" if self._rounding == "bfloat16" else "float32"


def own_dtype(source: WeightSource) -> torch.dtype:
    """Return the narrowest precision that holds a source's values."""
    dtype = DTYPES.get(source.dtype, torch.float32)
    return torch.float32 if dtype == torch.float64 else dtype


def values_of(library: Library, weights: CpuWeights, spec: WeightSpec, rounding: Rounding) -> Tensor:
    """Widen one weight to the precision that updates are kept in; numbers stay float32."""
    values = unpack(library, weights.matrices[spec.name]) if spec.kind == "matrix" else weights.vectors[spec.name]
    return values.bfloat16() if rounding == "bfloat16" and spec.kind != "number" else values
