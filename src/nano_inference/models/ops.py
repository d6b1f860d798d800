"""The operations of which decoders are composed (`models.program`). No torch.

A buffer is a named row of values per token; an executor chooses its memory. An operation with a field `out` binds that
name to a new value; `HeadNorm`, `Rotate`, `Softcap`, `GateValues` and `Smear` rebind buffers that they read. `Convolve`
and `GatedDelta` keep a recurrent state of each sequence, number `state` of `Program.states`.

Rounding: every operation computes and returns values in the model's precision P (float32, bfloat16 or float16) unless
its docstring differs; an executor may compute in higher precision (the C kernels use float32). `Linear` accumulates in
float32 and rounds once. `Widen` returns float32, and operations on its result compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

Activation = Literal["silu", "gelu_tanh", "relu_squared"]
TableRows = Literal["token", "previous", "pair"]
WeightKind = Literal["matrix", "vector", "number"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of a program, by its name in checkpoints and weight updates."""

    name: str
    shape: tuple[int, ...]
    kind: WeightKind = "matrix"
    """A matrix may be packed or quantised; a vector is stored in P; numbers are always float32."""
    tied: tuple[str, ...] = ()  # alternative names of the same values


@dataclass(frozen=True, slots=True)
class Number:
    """One entry of a weight of kind "number"."""

    weight: WeightSpec
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseOp:
    """Base of all operations: the buffers that an operation reads and binds, and its weights."""

    READS: ClassVar[tuple[str, ...]] = ("x",)
    """Fields that hold the buffers read: each a name, a tuple of names, or None."""
    WRITES: ClassVar[tuple[str, ...]] = ("out",)  # fields that hold the buffers bound

    @property
    def reads(self) -> tuple[str, ...]:
        return self._buffers(self.READS)

    @property
    def writes(self) -> tuple[str, ...]:
        return self._buffers(self.WRITES)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        """Return the values of all fields that hold weights or numbers, in the order of the fields."""
        found = (one for field in fields(self) for one in _as_tuple(getattr(self, field.name)))
        specs = (one.weight if isinstance(one, Number) else one for one in found)
        return tuple(spec for spec in specs if isinstance(spec, WeightSpec))

    def _buffers(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(buffer for name in names for buffer in _as_tuple(getattr(self, name)) if buffer is not None)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, slots=True)
class TablePart:
    """Which rows of a table one rank has."""

    first_row: int
    num_rows: int  # rows of the whole table


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(BaseOp):
    """out = scale · table[row], with scale rounded to P.

    The row is the token's id ("token"), the previous token's id ("previous"; 0 if there is none), or a hash of both
    ("pair", nanochat G2e): (36313 · id XOR 27191 · previous) mod (rows - 1), the last row if there is no previous one.
    With `part`, `table` has some rows of a table, and out is 0 for the others.
    """

    READS = ()

    out: str
    table: WeightSpec
    rows: TableRows = "token"
    scale: float = 1.0
    part: TablePart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(BaseOp):
    """out = x."""

    x: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(BaseOp):
    """out = x / sqrt(mean(x²) + eps) · (offset + weight), the quotient in float32 (RMSNorm, arXiv 1910.07467).

    The quotient is rounded to P before the multiplication if offset is 0, after it otherwise (Gemma: 1).
    """

    x: str
    out: str
    weight: WeightSpec | None
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(BaseOp):
    """out[i] = x W[i]^T + bias[i]: projections of one input, of which the first K values are used (W is [N, K]).

    Either all have a bias or none. `num_rows` truncates the outputs of a single matrix (padding of a vocabulary). The
    outputs are adjacent in memory.
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
    def widths(self) -> tuple[int, ...]:
        return tuple(self.num_rows or matrix.shape[0] for matrix in self.matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm(BaseOp):
    """Apply `Norm` to each head of each buffer, with one weight [head_dim] per buffer or none (Qwen3)."""

    WRITES = ("x",)

    x: tuple[str, ...]
    norms: tuple[WeightSpec, ...]
    head_dim: int
    eps: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.norms) in (0, len(self.x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate(BaseOp):
    """Rotate the first R dimensions of each head by the token's position (RoPE, arXiv 2104.09864).

    x · cos + swap_halves(x) · sin, with the first half of sin negated; cos and sin are rounded to P. `rope` is an index
    into `ModelConfig.ropes`, which defines R and the angles.
    """

    WRITES = ("x",)

    x: tuple[str, ...]
    head_dim: int
    rope: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Store(BaseOp):
    """Write the tokens' keys and values to a layer's cache, rounded to the cache's precision."""

    READS = ("k", "v")
    WRITES = ()

    k: str
    v: str
    layer: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(BaseOp):
    """out = softmax(cap(scale · q kᵀ)) v over the cached keys up to each token, grouped-query (arXiv 2305.13245).

    Query head h uses kv head h · num_kv_heads // num_heads. cap(s) = softcap · tanh(s / softcap) (Gemma 2). `window`
    restricts attention to the latest keys, the token's own included. Softmax is float32. `k` and `v` hold the step's
    keys and values, which are already stored.
    """

    READS = ("q", "k", "v")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(BaseOp):
    """Drop the rows whose outputs are not needed. At most one, after the last operation that reads other tokens."""

    READS = ()
    WRITES = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(BaseOp):
    """out = x + y."""

    READS = ("x", "y")

    x: str
    y: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(BaseOp):
    """x = the sum of x over all ranks, the same bits on each (tensor parallelism; inserted by `parallel.shard`)."""

    WRITES = ("x",)

    x: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(BaseOp):
    """out = a · x + sign · b · y, each product rounded to P; `a` None means 1 (nanochat from G1)."""

    READS = ("x", "y")

    x: str
    y: str
    out: str
    a: Number | None
    b: Number
    sign: Literal[1, -1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate(BaseOp):
    """out = act(gate) · up, act(gate) rounded to P (arXiv 2002.05202); relu² has no up (arXiv 2109.08668)."""

    READS = ("gate", "up")

    gate: str
    up: str | None
    out: str
    kind: Activation

    def __post_init__(self) -> None:
        assert (self.up is None) == (self.kind == "relu_squared")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateValues(BaseOp):
    """v += scale · sigmoid(gate) · more, one gate per kv head (nanochat from G2)."""

    READS = ("v", "gate", "more")
    WRITES = ("v",)

    v: str
    gate: str
    more: str
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Smear(BaseOp):
    """x += share · sigmoid(gate) · before, for tokens with a previous token (nanochat G4)."""

    READS = ("x", "gate", "before")
    WRITES = ("x",)

    x: str
    gate: str
    before: str
    share: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Unzip(BaseOp):
    """out[i] = part i of each group of x, side by side; a group has sum(widths) columns, its part i has widths[i]."""

    x: str
    out: tuple[str, ...]
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve(BaseOp):
    """out = silu(sum over i < K of weight[c, 0, i] · x[t - K + 1 + i, c]), the sum rounded to P: causal and depthwise.

    The channels c are the columns of the buffers x, and then of the buffers out. x is 0 before the sequence; the state
    holds its last K - 1 rows [K - 1, channels].
    """

    x: tuple[str, ...]
    out: tuple[str, ...]
    widths: tuple[int, ...]  # of each buffer out
    weight: WeightSpec  # [channels, 1, K]
    state: int

    def __post_init__(self) -> None:
        if self.weight.shape[2] < 2:
            raise ValueError(f"Convolve: {self.weight.name} has {self.weight.shape[2]} tap; at least 2 are supported")
        assert sum(self.widths) == self.weight.shape[0]

    @property
    def state_shape(self) -> tuple[int, ...]:
        channels, _, taps = self.weight.shape
        return (taps - 1, channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(BaseOp):
    """The gated delta rule (arXiv 2412.06464) of each value head h, with key head h · num_k_heads // num_v_heads.

    k' = k / sqrt(sum k² + 1e-6), q' = q / sqrt(sum q² + 1e-6) / sqrt(k_dim), beta = sigmoid(b) rounded to P, and
    g = -exp(a_log) · softplus(a + dt_bias). For each token, with the state S [k_dim, v_dim]:
    S = exp(g) S; S += k' (beta (v - Sᵀ k'))ᵀ; out = Sᵀ q'. In float32; out is rounded to P. With `is_tiled`, the key
    head is h % num_k_heads (files of llama.cpp).
    """

    READS = ("q", "k", "v", "a", "b")

    q: str
    k: str
    v: str
    a: str
    b: str
    out: str
    a_log: WeightSpec
    dt_bias: WeightSpec
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    state: int
    is_tiled: bool = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_v_heads, self.k_dim, self.v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNorm(BaseOp):
    """out = weight · x / rms(x) · silu(gate) for each head of x; like `Norm` with offset 0, then silu in float32."""

    READS = ("x", "gate")

    x: str
    gate: str
    out: str
    weight: WeightSpec
    eps: float
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(BaseOp):
    """out = x · sigmoid(gate), the second factor rounded to P."""

    READS = ("x", "gate")

    x: str
    gate: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Widen(BaseOp):
    """out = x in float32."""

    x: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Softcap(BaseOp):
    """x = cap · tanh(x / cap) (Gemma 2, nanochat)."""

    WRITES = ("x",)

    x: str
    cap: float


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
    | Reduce
    | Mix
    | Activate
    | GateValues
    | Smear
    | Unzip
    | Convolve
    | GatedDelta
    | GatedNorm
    | Gate
    | Widen
    | Softcap
)
