"""The operations that decoders are written in (`models.program` puts them together). No torch.

A buffer is a name for one row of values a token; an executor decides where it lies. An operation that has an `out`
binds that name anew; `HeadNorm`, `Rotate`, `Softcap`, `GateValues` and `Smear` bind the names that they read.

Rounding points. Every operation returns values in the model's precision P (float32, bfloat16 or float16) and computes
in P, unless it says otherwise; an executor may keep more precision inside (the C kernels compute in float32).
`Linear` accumulates in float32 and rounds once. `Widen` returns float32, and what reads its result computes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
TableRows = Literal["token", "previous", "pair"]
WeightKind = Literal["matrix", "vector", "number"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of a program, under the name that checkpoints and trainers give it."""

    name: str
    shape: tuple[int, ...]
    kind: WeightKind = "matrix"
    """A matrix may be packed or rounded; a vector has the model's precision; numbers are float32 in every precision."""
    tied: tuple[str, ...] = ()
    """Further names under which the same values may come."""


@dataclass(frozen=True, slots=True)
class Number:
    """One entry of a weight of kind "number"."""

    weight: WeightSpec
    index: int = 0


class BaseOp:
    """What every operation declares: the buffers that it reads and binds, and its weights."""

    __slots__ = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return ()

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(BaseOp):
    """out = scale · table[row]; scale is rounded to P first.

    The row is the token's id; that of the token before it ("previous", 0 where there is none); or the hash of both
    ("pair": (36313 · id XOR 27191 · previous) mod (rows - 1), the last row where there is no previous token; nanochat
    G2e).
    """

    out: str
    table: WeightSpec
    rows: TableRows = "token"
    scale: float = 1.0

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.table,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(BaseOp):
    """out = x."""

    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(BaseOp):
    """out = x / sqrt(mean(x²) + eps) · (offset + weight), the quotient in float32 (RMSNorm, arXiv 1910.07467).

    Without a weight the quotient is rounded to P. With offset 0 it is rounded before it is multiplied, with another
    offset (Gemma: 1) after.
    """

    x: str
    out: str
    weight: WeightSpec | None
    eps: float
    offset: float = 0.0

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.weight is None else (self.weight,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(BaseOp):
    """out[i] = x W[i]^T + bias[i], several projections of one input; x's first values, as many as W has columns.

    All have a bias or none has. `num_rows` keeps that many of a single matrix's outputs (a vocabulary without its
    padding). The results of one `Linear` lie side by side in memory.
    """

    x: str
    out: tuple[str, ...]
    matrices: tuple[WeightSpec, ...]
    biases: tuple[WeightSpec, ...] = ()
    num_rows: int | None = None

    def __post_init__(self) -> None:
        assert len(self.out) == len(self.matrices) and len({matrix.shape[1] for matrix in self.matrices}) == 1
        assert len(self.biases) in (0, len(self.out)) and (self.num_rows is None or len(self.out) == 1)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return self.out

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (*self.matrices, *self.biases)

    @property
    def widths(self) -> tuple[int, ...]:
        """Values that a row of each result has."""
        return tuple(self.num_rows or matrix.shape[0] for matrix in self.matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm(BaseOp):
    """Normalise each head of each buffer as `Norm` does a row; one weight [head_dim] a buffer, or none (Qwen3)."""

    x: tuple[str, ...]
    norms: tuple[WeightSpec, ...]
    head_dim: int
    eps: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.norms) in (0, len(self.x))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.x

    @property
    def writes(self) -> tuple[str, ...]:
        return self.x

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return self.norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate(BaseOp):
    """Turn the first R of each head's dimensions by the token's position (RoPE, arXiv 2104.09864; halves paired).

    x · cos + swap(x) · sin, with the first half's sine negated; cos and sin are rounded to P. `rope` is an index into
    `ModelConfig.ropes`, which give R and the angles.
    """

    x: tuple[str, ...]
    head_dim: int
    rope: int

    @property
    def reads(self) -> tuple[str, ...]:
        return self.x

    @property
    def writes(self) -> tuple[str, ...]:
        return self.x


@dataclass(frozen=True, slots=True, kw_only=True)
class Store(BaseOp):
    """Put the tokens' keys and values into a layer's cache, rounded to the cache's precision."""

    k: str
    v: str
    layer: int
    head_dim: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.k, self.v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(BaseOp):
    """out = softmax(cap(scale · q kᵀ)) v over the cached tokens up to each one, grouped-query (arXiv 2305.13245).

    Query head h reads kv head h · num_kv_heads // num_heads. cap(s) = softcap · tanh(s / softcap) (Gemma 2). A `window`
    of n leaves the n latest keys, the token's own among them. Softmax is float32. `k` and `v` are the step's own.
    """

    q: str
    k: str
    v: str
    out: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.q, self.k, self.v)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(BaseOp):
    """From here on only those rows remain that something is asked of. Behind the last `Attend`, one at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(BaseOp):
    """out = x + y."""

    x: str
    y: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.y)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(BaseOp):
    """out = a · x + sign · b · y, each product rounded to P; no `a` means 1 (nanochat G1 on)."""

    x: str
    y: str
    out: str
    a: Number | None
    b: Number
    sign: Literal[1, -1] = 1

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.y)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.b.weight,) if self.a is None else (self.a.weight, self.b.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate(BaseOp):
    """out = act(gate) · up, act(gate) rounded first (GLU variants, arXiv 2002.05202); relu² has no up (2109.08668)."""

    gate: str
    up: str | None
    out: str
    kind: Activation

    def __post_init__(self) -> None:
        assert (self.up is None) == (self.kind == "relu_squared")

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.gate,) if self.up is None else (self.gate, self.up)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateValues(BaseOp):
    """v += scale · sigmoid(gate) · more, a gate for each kv head (nanochat G2 on)."""

    v: str
    gate: str
    more: str
    head_dim: int
    scale: float

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.v, self.gate, self.more)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.v,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smear(BaseOp):
    """x += share · sigmoid(gate) · before, where the token has a predecessor (nanochat G4)."""

    x: str
    gate: str
    before: str
    share: Number

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.gate, self.before)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.share.weight,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widen(BaseOp):
    """out = x in float32."""

    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softcap(BaseOp):
    """x = cap · tanh(x / cap) (Gemma 2, nanochat)."""

    x: str
    cap: float

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.x,)


Op = (
    Embed
    | Copy
    | Norm
    | Linear
    | HeadNorm
    | Rotate
    | Store
    | Attend
    | Keep
    | Add
    | Mix
    | Activate
    | GateValues
    | Smear
    | Widen
    | Softcap
)
