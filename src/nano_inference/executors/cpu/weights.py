"""Packs new weights for the CPU kernels, each directly from its source.

Shapes: N outputs and K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from nano_inference.executors.cpu.library import BF16, F32, INT8, Library
from nano_inference.executors.cpu.lower import CpuWeights
from nano_inference.executors.cpu.matrix import PLAIN, Matrix, Packer, can_keep, can_round, pack_blocks, scan, unpack
from nano_inference.executors.live_weights import LiveWeights
from nano_inference.executors.staging import SMALL_PIECE, NotFinite, Pace, pieces_of, rows_of
from nano_inference.loading.packed import PackedTensor
from nano_inference.loading.pieces import DTYPES
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.support.memory import Slabs

_LARGE_PIECE = 1 << 18  # elements packed at a time when no steps run: they fit the second-level cache

Rounding = Literal["own", "bfloat16", "int8"]  # storage precision of weights: "own" keeps that of the source


class BoundWeights(Protocol):
    """A program lowered onto weights."""

    @property
    def weights(self) -> CpuWeights: ...


Model = TypeVar("Model", bound=BoundWeights)


class LiveCpuWeights(LiveWeights[Model]):
    """Packed weights, always in main memory; satisfies `protocol.Weights`."""

    def __init__(
        self, program: Program, library: Library, rounding: Rounding, bind: Callable[[CpuWeights], Model]
    ) -> None:
        super().__init__(torch.device("cpu"), lambda model: model.weights.matrices)
        self._program, self._library, self._rounding, self._bind = program, library, rounding, bind

    def rebound(self) -> Model:
        """Return the same weights bound anew, with buffers of their own."""
        return self._bind(self.model.weights)

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> CpuStaged:
        """Start filling new weights, reusing the memory of replaced ones first."""
        live = None if self._model is None else self._model.weights
        spare, self._spare = self._spare, {}
        tables = self._program.tables
        return CpuStaged(
            self._library, self._rounding, live, self._bind, spare, tables, pace, check_finite=check_finite
        )

    def move(self, device: torch.device) -> None:
        """Do nothing."""

    def values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight), each unpacked when it is yielded."""
        return self._values(self.model.weights, names)

    def staged_values(self, staged: Model) -> Iterator[tuple[str, Tensor]]:
        return self._values(staged.weights, None)

    def _values(self, weights: CpuWeights, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        for spec in self._program.weights:
            if names is None or spec.name in names:
                is_matrix = spec.kind == "matrix"
                values = unpack(self._library, weights.matrices[spec.name]) if is_matrix else weights.vectors[spec.name]
                is_rounded = self._rounding == "bfloat16" and spec.kind != "number"
                yield spec.name, values.bfloat16() if is_rounded else values

    @property
    def dtype(self) -> str:
        return "float32" if self._rounding == "own" else self._rounding

    @property
    def num_bytes(self) -> int:
        return 0 if self._model is None else self._model.weights.num_bytes


class CpuStaged:
    """Owns new weights while they are packed; `finish` takes missing weights from the current ones."""

    def __init__(
        self,
        library: Library,
        rounding: Rounding,
        live: CpuWeights | None,
        finish: Callable[[CpuWeights], Model],
        spare: dict[str, Matrix],
        tables: Collection[str],
        pace: Pace | None,
        *,
        check_finite: bool,
    ) -> None:
        """Start without weights; `finish` turns complete weights into the argument of `commit`.

        `spare` holds unused matrices by weight name, whose memory is reused. `tables`: see `Program.tables`.
        """
        self._library, self._rounding, self._live = library, rounding, live
        self._finish, self._spare, self._pace, self._check_finite = finish, spare, pace, check_finite
        self._tables = tables
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._slabs = Slabs()

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        """Pack one weight; return the bytes stored. Raises `NotFinite` if values are checked."""
        if spec.kind == "matrix":
            matrix = self._matrices[spec.name] = self._matrix(spec.name, source)
            return matrix.num_bytes
        values = self._read_vector(spec, source)
        if self._check_finite and not scan(self._library, values).is_finite:
            raise NotFinite(self._name)
        vector = self._vectors[spec.name] = values.float()
        return vector.nbytes

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        """Return True if a weight that was put equals another source once packed."""
        if spec.kind != "matrix":
            return torch.equal(self._vectors[spec.name], self._read_vector(spec, source).float())
        first = self._matrices[spec.name]
        values_NK = torch.empty(source.shape, dtype=torch.bfloat16 if self._rounding == "bfloat16" else torch.float32)
        source.read_into(values_NK)
        if first.format == INT8:
            packer = Packer(self._library, values_NK, Slabs(), INT8)
            packer.put(0, values_NK.size(0))
            return torch.equal(first.packed, packer.matrix.packed)
        return torch.equal(unpack(self._library, first), values_NK.float())

    def discard(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def finish(self) -> object:
        """Return the new weights, completed by the current ones, as `Weights.commit` takes them."""
        live = self._live or CpuWeights({}, {})
        matrices = MappingProxyType({**live.matrices, **self._matrices})
        return self._finish(CpuWeights(matrices, MappingProxyType({**live.vectors, **self._vectors})))

    def _matrix(self, name: str, source: WeightSource) -> Matrix:
        """Pack one matrix: ggml blocks unchanged if a kernel supports them, otherwise plain or rounded values."""
        spare = self._spare.pop(name, None)
        if isinstance(source, PackedTensor) and self._keeps_blocks(source):
            rows, order = source.read_blocks()
            kind, num_in = source.tensor.type_name, source.shape[1]
            return pack_blocks(self._library, kind, rows, num_in, self._slabs, order, rounds=self._rounding == "int8")
        weight_NK = self._values(source)
        likely = self._likely_format(weight_NK, spare)
        packed = self._packed(name, weight_NK, likely, spare)
        if packed is None:
            packed = self._packed(name, weight_NK, BF16 if likely == F32 else F32, spare)
        assert packed is not None
        return packed

    def _packed(self, name: str, weight_NK: Tensor, kind: int, spare: Matrix | None) -> Matrix | None:
        """Pack plain values in format `kind`; None if another format is the narrowest exact one.

        Each piece is scanned just before it is packed, while it is in the CPU cache.
        """
        by_rows = name in self._tables
        packer = Packer(self._library, weight_NK, self._slabs, kind, spare, by_rows=by_rows)
        must_fit = self._rounding == "own" and weight_NK.dtype == torch.float32
        fits = True
        for piece in self._pieces(weight_NK):
            if self._check_finite or must_fit:
                found = scan(self._library, weight_NK[piece])
                if self._check_finite and not found.is_finite:
                    raise NotFinite(self._name)
                fits = fits and found.fits_bfloat16
                if kind == BF16 and must_fit and not fits:
                    return None
            packer.put(piece.start, piece.stop)
        return None if kind == F32 and must_fit and fits else packer.matrix

    def _likely_format(self, weight_NK: Tensor, spare: Matrix | None) -> int:
        """Guess the narrowest exact format from the first row and the previous matrix; `_packed` verifies it."""
        if self._rounding == "int8":
            return INT8
        kind = PLAIN[weight_NK.dtype]
        if kind != F32:
            return kind
        first = scan(self._library, weight_NK[:1])
        return BF16 if first.fits_bfloat16 and (spare is None or spare.format != F32) else F32

    def _keeps_blocks(self, source: PackedTensor) -> bool:
        """Return True if a tensor's ggml blocks are packed without dequantising them."""
        can = {"own": can_keep, "int8": can_round}.get(self._rounding)
        is_whole = not source.shift and source.column_range is None
        return can is not None and is_whole and can(source.tensor.type_name, source.shape[1])

    def _read_vector(self, spec: WeightSpec, source: WeightSource) -> Tensor:
        """Read a norm, a bias or numbers as float32; `rounding="bfloat16"` rounds norms and biases."""
        rounds = self._rounding == "bfloat16" and spec.kind == "vector"
        values = torch.empty(source.shape, dtype=torch.bfloat16 if rounds else torch.float32)
        source.read_into(values)
        return values

    def _values(self, source: WeightSource) -> Tensor:
        """Return a matrix as contiguous plain values, without a copy if the source already has that form."""
        own = DTYPES.get(source.dtype, torch.float32)  # the narrowest precision of the kernels that holds the values
        dtype = torch.bfloat16 if self._rounding == "bfloat16" else torch.float32 if own == torch.float64 else own
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
        pace, elements = (self._pace, SMALL_PIECE) if self._pace else (lambda _: None, _LARGE_PIECE)
        return pieces_of(tuple(weight_NK.shape), weight_NK.element_size(), pace, elements)

    @property
    def _name(self) -> str:
        return "bfloat16" if self._rounding == "bfloat16" else "float32"
