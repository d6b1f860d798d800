"""The kernels' operations on named buffers, with one row per token; c/program.c executes them.

Shapes: K inputs of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nano_inference.executors.cpu.matrix import Matrix

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
Rows = Literal["token", "previous", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """out = scale · table[row]; the row is the token, the previous token, or a hash of both (nanochat)."""

    out: str
    table: Matrix
    rows: Rows = "token"
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """out (+)= x / rms(x) · (offset + weight); weight None means 1 (arXiv 1910.07467)."""

    x: str
    out: str
    weight: Tensor | None
    eps: float
    offset: float = 0.0
    add: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """out (+)= x[:K] W^T + bias; the matrices' outputs are adjacent columns."""

    x: str
    out: str
    matrices: tuple[Matrix, ...]
    bias: Tensor | None = None
    add: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Normalise and rotate queries and keys of `x` (queries, keys, values), then write K/V to the cache."""

    x: str
    layer: int  # -1 does not write the cache
    rope: int | None
    norm: Literal["none", "before", "after"] = "none"
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """out = softmax(cap(scale q·k)) v over the cache; the queries are the first columns of `x`."""

    x: str
    out: str
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate:
    """out = act(gate) · up, x = (gate, up) (arXiv 2002.05202); relu² has no up (arXiv 2109.08668)."""

    x: str
    out: str
    kind: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """out = a · x + scale · b · y; a and b are tensors of one value, None means 1."""

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
    """Values of x (queries, keys, values) += scale · sigmoid(gate) · more, one gate per kv head (nanochat)."""

    x: str
    gate: str
    more: str
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Smear:
    """x += weight · sigmoid(gate) · before, for tokens with a previous token (nanochat G4)."""

    x: str
    gate: str
    before: str
    weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Select the step's `Layout.keep_K` rows: move them to the front of up to three buffers.

    Another `Keep` may follow directly, for further buffers. No operation that reads other tokens can follow.
    """

    buffers: tuple[str, ...]  # all buffers that later operations read


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrange:
    """out = pieces of x of `dim` columns; `pieces` (int32) holds the number in x of each."""

    x: str
    out: str
    pieces: Tensor
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve:
    """out = silu(causal convolution of the first columns of x); weight [taps, channels], `state` floats into a slot."""

    x: str
    out: str
    weight: Tensor
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The gated delta rule of x (queries, keys, values); columns `a` and `b` of `more` start the heads' numbers.

    Overwrites queries, keys, a and b. `state` floats into a slot are [heads, column groups, k_dim, columns].
    """

    x: str
    more: str
    a: int
    b: int
    out: str
    a_log: Tensor
    dt_bias: Tensor
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    is_tiled: bool  # value head h has key head h % num_k_heads
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNorm:
    """out = weight · x / rms(x) · silu(gate) of each head; the gate starts at a column of `more`."""

    x: str
    more: str
    column: int
    out: str
    weight: Tensor
    eps: float
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """out = x · sigmoid(gate); the gate starts at a column of `more`."""

    x: str
    more: str
    column: int
    out: str


SmallOp = Activate | Mix | Softcap | GateValues | Smear | Keep
DeltaOp = Arrange | Convolve | Delta | GatedNorm | Gate
Op = Embed | Norm | Product | Heads | Attend | SmallOp | DeltaOp
KINDS: tuple[type[Op], ...] = (
    *(Embed, Norm, Product, Heads, Attend, Activate, Mix, Softcap, GateValues, Smear, Keep),
    *(Arrange, Convolve, Delta, GatedNorm, Gate),
)
"""In the order of the enumeration in c/program.c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Operations in order, with the sizes of their buffers and heads."""

    ops: tuple[Op, ...]
    widths: dict[str, int]  # floats per row of each buffer
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1

    def __post_init__(self) -> None:
        kept = [index for index, op in enumerate(self.ops) if isinstance(op, Keep)]
        assert kept == list(range(kept[0], kept[0] + len(kept))) if kept else True
        assert not kept or not any(isinstance(op, Embed | Smear | Convolve | Delta) for op in self.ops[kept[0] :])
