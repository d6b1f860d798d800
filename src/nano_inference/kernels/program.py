"""A forward pass as data: operations on named buffers, one row a token. c/program.c executes it.

Shapes: T tokens of a step, W width of a buffer, N outputs and K inputs of a matrix (in `keep_K` the tokens that are
kept), P positions, R rotary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nano_inference.kernels.matrix import Matrix

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
Rows = Literal["token", "previous", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """out = scale · table[row], the row being the token, the one before it, or the hash of both (nanochat)."""

    out: str
    table: Matrix
    rows: Rows = "token"
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """out (+)= x / rms(x) · (offset + weight); no weight stands for 1 (arXiv 1910.07467)."""

    x: str
    out: str
    weight: Tensor | None
    eps: float
    offset: float = 0.0
    add: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """out (+)= x W^T + bias, the matrices' outputs side by side; of x the first K values."""

    x: str
    out: str
    matrices: tuple[Matrix, ...]
    bias: Tensor | None = None
    add: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Norm and turn the queries and keys of `x` (queries, keys, values side by side), then put K/V into the cache."""

    x: str
    layer: int
    """-1 leaves the cache as it is."""
    rope: int | None
    norm: Literal["none", "before", "after"] = "none"
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """out = softmax(cap(scale q·k)) v over the cache, for the queries that `x` begins with."""

    x: str
    out: str
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate:
    """out = act(gate) · up, gate and up side by side in x (arXiv 2002.05202); relu² has no up (arXiv 2109.08668)."""

    x: str
    out: str
    kind: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """out = a · x + scale · b · y; a and b are tensors of one value, None stands for 1."""

    x: str
    y: str
    out: str
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Softcap:
    """x = cap · tanh(x / cap)."""

    x: str
    cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateValues:
    """The values in x (queries, keys, values) get scale · sigmoid(gate) · more, a gate for each kv head (nanochat)."""

    x: str
    gate: str
    more: str
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Smear:
    """x += weight · sigmoid(gate) · before, where the token has a predecessor (nanochat G4)."""

    x: str
    gate: str
    before: str
    weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """From here on only the step's `keep_K` rows remain, moved to the front of up to three buffers.

    Further buffers have a `Keep` of their own directly behind. Nothing after it reads the tokens (`Embed`, `Smear`).
    """

    buffers: tuple[str, ...]
    """What later operations read."""


RowOp = Embed | Norm | Product | Heads | Attend | Activate | Mix | Softcap | GateValues | Smear
Op = RowOp | Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Operations, in order, and what they work on."""

    ops: tuple[Op, ...]
    widths: dict[str, int]
    """Floats that a row of each buffer has."""
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1

    def __post_init__(self) -> None:
        kept = [index for index, op in enumerate(self.ops) if isinstance(op, Keep)]
        assert kept == list(range(kept[0], kept[0] + len(kept))) if kept else True
        assert not kept or not any(isinstance(op, Embed | Smear) for op in self.ops[kept[0] :])
