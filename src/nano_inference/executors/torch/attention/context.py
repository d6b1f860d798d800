"""What every layer may know of a step: built once a step, passed down as an argument, never stored.

Shapes: T tokens of the step (all rows one after another), R rows, H heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.store import KVStore


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
