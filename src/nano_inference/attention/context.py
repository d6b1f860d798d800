"""What every layer may know of a step: built once a step, passed down as an argument, never stored.

Shapes: T tokens of the step (all rows one after another), R rows, H heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from nano_inference.kv.store import KVStore


class Span(NamedTuple):
    """One row's place in a step."""

    offset: int
    """Index of its first token among the step's T."""
    num_tokens: int
    start: int
    """Position of its first token in the sequence."""
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position after its last token, which is also how many keys that token sees without a window."""
        return self.start + self.num_tokens


class Laid(NamedTuple):
    """The tokens of a step, one row after another."""

    tokens: list[int]
    previous: list[int]
    """The token before each, -1 at the start of a sequence."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """A step as tensors and spans."""

    token_T: Tensor
    prev_T: Tensor
    """The token before each token, -1 at the start of a sequence."""
    position_T: Tensor
    slot_T: Tensor
    """Where each token's K/V goes in the store."""
    spans: tuple[Span, ...]
    """Rows of one token first, shortest sequence first, then the chunks."""


class AttentionSpec(NamedTuple):
    """How one layer attends."""

    scale: float
    window: int | None = None
    """Keys a query sees, itself included."""
    softcap: float | None = None


class Backend(Protocol):
    """One way of reading paged K/V. Stateless: what it works out for a step is the plan."""

    def plan(self, step: ForwardInput, block_size: int, window: int | None) -> Any:
        """Work out a step's indices and masks for the layers of one window."""

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, store: KVStore, layer: int, spec: AttentionSpec, plan: Any
    ) -> Tensor:
        """Return softmax(scale q·k) v over what each token may see, [T, H, D]; the step's K/V is in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The arguments of every layer in one step."""

    step: ForwardInput
    store: KVStore
    backend: Backend
    plans: Mapping[int | None, Any]
    """The backend's plan for each window that the model has."""
    ropes: tuple[tuple[Tensor, Tensor], ...]
    """cos and signed sin [T, 1, rotary size] of the step's positions, a pair for each of the model's embeddings."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
        """Store the step's keys and values, then attend."""
        self.store.write(layer, self.step.slot_T, k_TKD, v_TKD)
        return self.backend.attend(q_THD, k_TKD, v_TKD, self.store, layer, spec, self.plans[spec.window])
