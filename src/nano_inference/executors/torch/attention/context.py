"""`Backend`, and `StepContext`, the per-step arguments of every layer.

Shapes: T tokens of the step (rows concatenated), H heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.states import StatePlan
from nano_inference.executors.torch.store import KVStore


class AttentionSpec(NamedTuple):
    """One layer's attention parameters."""

    scale: float
    window: int | None = None  # number of latest keys that a query attends to, its own included; None: all
    softcap: float | None = None


class Backend(Protocol):
    """An implementation of attention over paged K/V. Stateless: per-step data is in the plan."""

    def plan(self, step: ForwardInput, block_size: int, window: int | None) -> Any:
        """Compute a step's indices and masks for the layers with one window size."""

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, store: KVStore, layer: int, spec: AttentionSpec, plan: Any
    ) -> Tensor:
        """Return softmax(scale q·k) v over the keys visible to each token, [T, H, D]; the step's K/V is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The arguments of every layer in one step."""

    step: ForwardInput
    store: KVStore
    backend: Backend
    plans: Mapping[int | None, Any]  # the backend's plan for each window size of the model
    ropes: tuple[tuple[Tensor, Tensor], ...]
    """For each rotary embedding of the model: cos and signed sin of the step's positions, [T, 1, rotary size]."""
    states: StatePlan | None = None  # None for programs without recurrent states
