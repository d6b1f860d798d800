"""`LiveWeights`: the weights in use, and the memory of replaced ones. Base of torch's, CUDA's and the CPU kernels'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from nano_inference.executors.devices import release_unused

Model = TypeVar("Model")


class LiveWeights(Generic[Model]):
    """Owns weights that are bound to a program; see `protocol.Weights`, which documents the methods."""

    def __init__(self, device: torch.device, parts_of: Callable[[Model], Mapping[str, Any]]) -> None:
        """`parts_of` returns the memory of bound weights, by name."""
        self.device = device
        self._parts_of = parts_of
        self._model: Model | None = None
        self._spare: dict[str, Any] = {}
        """Replaced parts; the next update reuses their memory, because filling new pages is several times slower."""
        self._shared: frozenset[str] = frozenset()
        """Names of parts that another executor uses, too: their memory is never reused."""

    @property
    def model(self) -> Model:
        assert self._model is not None, "there are no weights"
        return self._model

    def commit(self, staged: Model) -> None:
        if self._model is staged:
            return
        old, new = {} if self._model is None else self._parts_of(self._model), self._parts_of(staged)
        replaced = {name: part for name, part in old.items() if part is not new[name]}
        is_kept = self.device.type == "cpu"
        spare = {name: part for name, part in replaced.items() if is_kept and name not in self._shared}
        # In this order, an interruption never marks memory as spare that the model still uses.
        self._model = staged
        self._spare = spare
        self._shared = self._shared - replaced.keys()

    def drop_spare(self) -> None:
        self._spare = {}

    def discard(self) -> None:
        """Free the memory, unless another executor shares it."""
        self._model, self._spare = None, {}
        release_unused(self.device)

    def share_with(self, other: LiveWeights[Model], model: Model) -> None:
        """Let another executor use this memory, bound as `model`. Updates of either allocate new memory."""
        self._shared = other._shared = frozenset(self._parts_of(self.model))
        other._spare = {}
        other._model = model
