"""Registers: fixed memory for the buffers of a program, and the state of their assignment while it is lowered.

A register is a matrix with one row per token; the outputs of one `Linear` are adjacent columns of one register. A
register is reused after the last operation that reads it.

Shapes: F rotary size / 2, L positions, N values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cuda.adapters import AdapterStacks
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.passes import Pass
from nano_inference.executors.cuda.ranks import RankMemory
from nano_inference.executors.cuda.records import HeadNorms, NormOrder, RangeMemory
from nano_inference.executors.torch.weights import TorchWeights
from nano_inference.models import ops
from nano_inference.models.ops import Number, Op

Launch = Callable[[Pass | None, int], None]
"""Computes one operation for the first n tokens of a pass; parts that read neither tokens nor the cache need none."""


Ropes = tuple[tuple[Tensor, Tensor], ...]
"""Cosines and sines [L, F] of every position, for each rotary embedding of a program."""


class Columns(NamedTuple):
    """Location of a buffer: columns [start, start + width) of a register."""

    register: int
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class Lowered:
    """One part of a program as launches."""

    launches: tuple[Launch, ...]
    keep_after: int  # how many launches precede `Keep`; all of them if there is none
    kept: tuple[int, ...]  # registers that are read after `Keep`
    result: Columns
    softcap: float | None  # soft cap of the result that no launch applies, because it follows `Widen`
    registers: tuple[int, ...]  # all registers that the launches write


class Registers:
    """Owns the memory of the registers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._memory: list[Tensor] = []

    def new(self, num_rows: int, width: int) -> int:
        """Add a register; return its number."""
        self._memory.append(torch.zeros((num_rows, width), dtype=self._dtype, device=self._device))
        return len(self._memory) - 1

    def holds(self, register: int, num_rows: int, width: int) -> bool:
        """Return whether a register has this width, and at least so many rows."""
        return self._memory[register].size(0) >= num_rows and self._memory[register].size(1) == width

    def width(self, register: int) -> int:
        return self._memory[register].size(1)

    def rows(self, register: int, num_rows: int) -> Tensor:
        return self._memory[register].narrow(0, 0, num_rows)

    def read(self, at: Columns, num_rows: int) -> Tensor:
        """Return a buffer [num_rows, width]."""
        return self._memory[at.register].narrow(0, 0, num_rows).narrow(1, at.start, at.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the launches of every part share."""

    kernels: Kernels
    registers: Registers
    weights: TorchWeights
    ropes: Ropes
    one_1: Tensor  # the number 1, float32 [1]
    ranges: RangeMemory  # scratch memory of `multiply`
    adapters: AdapterStacks
    ranks: RankMemory | None = None  # of a divided program
    is_deterministic: bool = False  # compute every matrix product with `multiply`, whatever the number of rows


@dataclass(slots=True)
class Heads:
    """Norms and rotation of queries and keys that the next `Store` applies."""

    names: tuple[str, ...]
    order: NormOrder = "none"
    norm: ops.HeadNorm | None = None
    rope: int | None = None


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """What a `Store` reads: queries, keys and values of one register, with their norms and rotation."""

    qkv: Columns
    cos_LF: Tensor
    sin_LF: Tensor
    norms: HeadNorms


@dataclass
class Lowering:
    """Buffers and free registers while operations are lowered, in order."""

    machine: Machine
    part: Sequence[Op]
    num_rows: int  # most rows of a pass
    live: list[frozenset[str]]
    places: dict[str, Columns]
    owned: list[int]  # registers that this part may use
    free: list[int]  # those of them that hold no live buffer
    heads: Heads | None = None
    stored: StoredHeads | None = None  # of the latest `Store` with a rotation
    launches: list[Launch] = field(default_factory=list)
    keep_after: int | None = None
    kept: tuple[int, ...] = ()
    softcap: float | None = None
    is_wide: bool = False

    def place(self, names: Sequence[str], widths: Sequence[int]) -> int:
        """Assign buffers to adjacent columns of a register that no live buffer uses."""
        registers, size = self.machine.registers, (self.num_rows, sum(widths))
        found = next((one for one in self.free if registers.holds(one, *size)), None)
        if found is None:
            found = registers.new(*size)
            self.owned.append(found)
        else:
            self.free.remove(found)
        start = 0
        for name, one in zip(names, widths, strict=True):
            self.places[name] = Columns(found, start, one)
            start += one
        return found

    def release(self, live: frozenset[str]) -> None:
        """Free the registers of buffers that are not live."""
        self.places = {name: place for name, place in self.places.items() if name in live}
        used = {place.register for place in self.places.values()}
        self.free = [register for register in self.owned if register not in used]

    def whole(self, op: Op, name: str) -> int:
        """Return the register of a buffer, to be changed in place. Raises `ValueError` if it holds other buffers."""
        place = self.places[name]
        others = [other for other, at in self.places.items() if at.register == place.register and other != name]
        if others or place.width != self.machine.registers.width(place.register):
            raise ValueError(f"{type(op).__name__} of {name}: the CUDA kernels need a buffer of its own here")
        return place.register

    def matrix(self, op: ops.Linear) -> tuple[Tensor, Tensor | None]:
        """Return the merged matrices and biases of a `Linear`."""
        weights, size = self.machine.weights, sum(op.widths)
        bias_N = weights.stacked(op.biases).narrow(0, 0, size) if op.biases else None
        return weights.stacked(op.matrices).narrow(0, 0, size), bias_N

    def number(self, number: Number) -> Tensor:
        return self.machine.weights.tensors[number.weight.name].narrow(0, number.index, 1)
