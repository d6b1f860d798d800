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
from nano_inference.support.memory import Slabs

_UNIT, _LINE = 16, 64  # RANK_UNIT; bytes of a cache line
PARTS = ("body", "head")


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """An adapter in packed memory. float32 values are stored as bfloat16 if all of a pair's are exact in it."""

    tables: Mapping[str, ctypes.Array[LowRankStruct]]  # by part: an entry for each matrix of the C program, in order
    width: int  # columns that x Aᵀ of one `Linear` takes, at most
    memory: tuple[Tensor, ...]
    num_bytes: int


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


class _Packed(NamedTuple):
    struct: LowRankStruct
    memory: tuple[Tensor, Tensor]


def pack_adapter(library: Library, program: Program, adapter: Adapter) -> CpuAdapter:
    """Return an adapter of a program in packed memory. Any thread may call this."""
    slabs = Slabs(adapter.num_bytes + _LINE)
    packed = {name: _pack(library, pair, slabs) for name, pair in adapter.pairs.items()}
    tables: dict[str, ctypes.Array[LowRankStruct]] = {}
    width = 0
    for part, ops in zip(PARTS, (program.body, (*program.final, *program.head)), strict=True):
        structs: list[LowRankStruct] = []
        for op in ops:
            column = 0
            for name in _matrices_of(op):
                struct = LowRankStruct()
                if name in packed:
                    struct = LowRankStruct.from_buffer_copy(packed[name].struct)
                    struct.column = column
                    column += -(-struct.rank // _UNIT) * _UNIT
                structs.append(struct)
            width = max(width, column)
        tables[part] = (LowRankStruct * len(structs))(*structs)
    memory = tuple(tensor for one in packed.values() for tensor in one.memory)
    return CpuAdapter(tables, width, memory, sum(tensor.nbytes for tensor in memory))


def _matrices_of(op: Op) -> tuple[str, ...]:
    """Return the names of an operation's matrices, in the order of the C program; "" for a table."""
    return tuple(spec.name for spec in op.matrices) if isinstance(op, Linear) else ("",) * isinstance(op, Embed)


def _pack(library: Library, pair: LowRank, slabs: Slabs) -> _Packed:
    """Pack one pair in the narrower of float32 and bfloat16 that holds its values."""
    dtype = torch.bfloat16 if pair.a_RK.dtype == pair.b_NR.dtype == torch.bfloat16 else torch.float32
    a_RK, b_NR = (tensor.to("cpu", dtype).contiguous() for tensor in pair[:2])
    is_short = all(scan(library, tensor).fits_bfloat16 for tensor in (a_RK, b_NR))
    kind, (rank, num_in), num_out = BF16 if is_short else F32, a_RK.shape, b_NR.size(0)
    code = library.code
    a = slabs.take(code.nano_low_bytes(kind, rank, num_in))
    b = slabs.take(code.nano_packed_bytes(kind, num_out, rank))
    sizes = (rank, num_in, num_out)
    code.nano_pack_low(PLAIN[dtype], kind, a_RK.data_ptr(), b_NR.data_ptr(), *sizes, a.data_ptr(), b.data_ptr())
    return _Packed(LowRankStruct(rank, 0, kind, pair.scale, a.data_ptr(), b.data_ptr()), (a, b))
