"""`Program`: a decoder as lists of operations, from which its weights and caches are derived. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nano_inference.models.config import RopeConfig
from nano_inference.models.ops import (
    Attend,
    Convolve,
    Embed,
    GatedDelta,
    Keep,
    Op,
    Rotate,
    Smear,
    Store,
    WeightSpec,
)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The K/V cache of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None  # number of latest tokens that any query reads; None: all


@dataclass(frozen=True, slots=True)
class OpState:
    """What one operation keeps of a sequence beside K/V: float32 values of this shape, zeros before its first token."""

    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A decoder in three parts. Raises `ValueError` naming a buffer that is read before it is written."""

    body: tuple[Op, ...]  # tokens to buffer x: the residual after the last layer, of the kept rows
    final: tuple[Op, ...]  # buffer x to buffer h: the final norm
    head: tuple[Op, ...]  # buffer h to buffer logits: float32 [rows, vocab_size]
    vocab_size: int
    hidden_size: int
    ropes: tuple[RopeConfig, ...]  # indexed by `Rotate.rope`
    has_full_decode: bool = False
    """Windows restrict prompt tokens only; generated tokens attend to all keys (nanochat, decode_window=full)."""

    def __post_init__(self) -> None:
        check_order(self.body, frozenset(), "x")
        check_order(self.final, frozenset({"x"}), "h")
        check_order(self.head, frozenset({"h"}), "logits")
        numbers = [op.state for op in self.body if isinstance(op, Convolve | GatedDelta)]
        if numbers != list(range(len(numbers))):
            raise ValueError(f"states must be numbered in order of their operations, got {numbers}")
        if numbers and self.has_full_decode:
            raise ValueError("a program with states computes prompt and generated tokens in one pass")

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*self.body, *self.final, *self.head)

    @cached_property
    def weights(self) -> tuple[WeightSpec, ...]:
        """Return every weight once, in order of use."""
        found = {spec.name: spec for op in self.ops for spec in op.weights}
        assert all(found[spec.name] == spec for op in self.ops for spec in op.weights)
        return tuple(found.values())

    @cached_property
    def tied_names(self) -> dict[str, str]:
        """Map alternative names of weights to their names."""
        return {other: spec.name for spec in self.weights for other in spec.tied}

    @cached_property
    def tables(self) -> frozenset[str]:
        """Return the names of the weights of which only single rows are read, by `Embed`."""
        embeds = {op.table.name for op in self.ops if isinstance(op, Embed)}
        others = {spec.name for op in self.ops if not isinstance(op, Embed) for spec in op.weights}
        return frozenset(embeds - others)

    @cached_property
    def caches(self) -> tuple[LayerCache, ...]:
        """Return the cache of each layer."""
        attends = sorted((op for op in self.body if isinstance(op, Attend)), key=lambda op: op.layer)
        return tuple(
            LayerCache(op.num_kv_heads, op.head_dim, None if self.has_full_decode else op.window) for op in attends
        )

    @cached_property
    def states(self) -> tuple[OpState, ...]:
        """Return the recurrent states, in order of the operations that keep them; indexed by their `state`."""
        return tuple(OpState(op.state_shape) for op in self.body if isinstance(op, Convolve | GatedDelta))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one slot: the states of one sequence, over all operations."""
        return 4 * sum(math.prod(state.shape) for state in self.states)

    def state_start(self, index: int) -> int:
        """Return where a state starts in a slot, in floats."""
        return sum(math.prod(state.shape) for state in self.states[:index])

    @property
    def windows(self) -> frozenset[int | None]:
        """Return the distinct window sizes of the layers."""
        return frozenset(op.window for op in self.body if isinstance(op, Attend))

    def without_windows(self) -> Program:
        """Return the same program with full attention in all layers."""
        body = tuple(replace(op, window=None) if isinstance(op, Attend) else op for op in self.body)
        return replace(self, body=body)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of one token's keys and values, over all layers."""
        return bytes_per_value * sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.caches)


def check_order(part: tuple[Op, ...], given: frozenset[str], wanted: str) -> None:
    """Raise `ValueError` if a buffer is read before it is written, or `wanted` is never written."""
    known = set(given)
    kept = False
    for op in part:
        missing = [name for name in op.reads if name not in known]
        if missing:
            raise ValueError(f"{type(op).__name__} reads {missing[0]}, which no earlier operation writes")
        if kept and isinstance(op, Embed | Smear | Rotate | Store | Attend | Keep | Convolve | GatedDelta):
            raise ValueError(f"{type(op).__name__} after Keep: it needs all tokens of the step, Keep drops some")
        kept |= isinstance(op, Keep)
        known.update(op.writes)
    if wanted not in known:
        raise ValueError(f"no operation writes {wanted}")


def live_after(part: Sequence[Op], result: str) -> list[frozenset[str]]:
    """Return, for each operation, the buffers that are needed after it (`result` included)."""
    live = frozenset({result})
    found: list[frozenset[str]] = []
    for op in reversed(part):
        found.append(live)
        live = live.difference(op.writes).union(op.reads)
    return found[::-1]
