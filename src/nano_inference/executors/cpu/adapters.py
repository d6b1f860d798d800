"""Packed adapters, and those of a step's rows, as the C kernels read them (c/adapters.h).

Shapes: R ranks of an adapter, N outputs and K inputs of a matrix, T tokens of a step, K kept tokens, W columns.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.executors.cpu.library import BF16, F32, Library, LowRankStruct
from nano_inference.executors.cpu.matrix import PLAIN, scan
from nano_inference.loading.adapters import Adapter, LowRank
from nano_inference.models.ops import Embed, Linear, Op
from nano_inference.models.program import Program
from nano_inference.support.memory import lazy_zeros

_UNIT, _LINE = 16, 64  # RANK_UNIT; bytes of a cache line
PARTS = ("body", "head")


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """An adapter in packed memory. float32 values are stored as bfloat16 if all of a pair's are exact in it."""

    tables: Mapping[str, ctypes.Array[LowRankStruct]]  # by part: an entry for each matrix of the C program, in order
    width: int  # columns that x Aᵀ of one `Linear` takes, at most
    memory: Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step: the index of each token's, -1 for none, and the memory that they need."""

    all_T: array[int]
    kept_K: array[int]
    tables: Mapping[str, array[int]]  # addresses of the adapters' tables, by part
    low_TW: np.ndarray[Any, np.dtype[np.float32]]

    @property
    def kept(self) -> AdapterRows:
        """Return the same for a program whose rows are the kept ones."""
        return replace(self, all_T=self.kept_K)


def adapter_rows(numbers: Sequence[int], kept: Sequence[int], adapters: Mapping[int, CpuAdapter]) -> AdapterRows | None:
    """Return the adapters of tokens from the number of each one's, 0 for none; None if no token has one."""
    found = sorted({*numbers} - {0})
    if not found:
        return None
    index = {number: place for place, number in enumerate(found)} | {0: -1}
    used = [adapters[number] for number in found]
    return AdapterRows(
        all_T=array("i", [index[number] for number in numbers]),
        kept_K=array("i", [index[numbers[place]] for place in kept]),
        tables={part: array("Q", [ctypes.addressof(one.tables[part]) for one in used]) for part in PARTS},
        low_TW=np.empty((len(numbers), max(one.width for one in used)), np.float32),
    )


class _Place(NamedTuple):
    """A pair's values, the format to store them in, and where they start in the memory of the adapter."""

    pair: LowRank
    kind: int
    a: int
    b: int


def pack_adapter(library: Library, program: Program, adapter: Adapter) -> CpuAdapter:
    """Return an adapter of a program in packed memory. Any thread may call this."""
    places: dict[str, _Place] = {}
    size = 0
    for name, pair in adapter.pairs.items():
        plain, kind = _narrowest(library, pair)
        (rank, num_in), num_out = plain.a_RK.shape, plain.b_NR.size(0)
        b = size + _aligned(_padded(rank) * num_in * (2 if kind == BF16 else 4))
        places[name] = _Place(plain, kind, size, b)
        size = b + _aligned(library.code.nano_packed_bytes(kind, num_out, rank))
    memory = lazy_zeros((size + _LINE,), torch.uint8, torch.device("cpu"))
    base = _aligned(memory.data_ptr())
    for place in places.values():
        _pack(library, place, base)
    width = 0
    tables: dict[str, ctypes.Array[LowRankStruct]] = {}
    for part, ops in zip(PARTS, (program.body, (*program.final, *program.head)), strict=True):
        structs: list[LowRankStruct] = []
        for op in ops:
            column = 0
            for name in _matrices_of(op):
                if name not in places:
                    structs.append(LowRankStruct())
                    continue
                (a_RK, _, scale), kind, a, b = places[name]
                structs.append(LowRankStruct(a_RK.size(0), column, kind, scale, base + a, base + b))
                column += _padded(a_RK.size(0))
            width = max(width, column)
        tables[part] = (LowRankStruct * len(structs))(*structs)
    return CpuAdapter(tables, width, memory)


def _padded(rank: int) -> int:
    return -(-rank // _UNIT) * _UNIT


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _matrices_of(op: Op) -> tuple[str, ...]:
    """Return the names of an operation's matrices, in the order of the C program; "" for a table."""
    return tuple(spec.name for spec in op.matrices) if isinstance(op, Linear) else ("",) * isinstance(op, Embed)


def _narrowest(library: Library, pair: LowRank) -> tuple[LowRank, int]:
    """Return a pair's plain values, and the narrower of float32 and bfloat16 that holds them."""
    is_short = pair.a_RK.dtype == pair.b_NR.dtype == torch.bfloat16
    dtype = torch.bfloat16 if is_short else torch.float32
    a_RK, b_NR = (tensor.to("cpu", dtype).contiguous() for tensor in pair[:2])
    fits = is_short or all(scan(library, tensor).fits_bfloat16 for tensor in (a_RK, b_NR))
    return LowRank(a_RK, b_NR, pair.scale), BF16 if fits else F32


def _pack(library: Library, place: _Place, base: int) -> None:
    (a_RK, b_NR, _), kind, a, b = place
    sizes = (*a_RK.shape, b_NR.size(0))
    values = (a_RK.data_ptr(), b_NR.data_ptr())
    library.code.nano_pack_low(PLAIN[a_RK.dtype], kind, *values, *sizes, base + a, base + b)
