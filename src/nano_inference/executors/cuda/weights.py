"""`LiveCudaWeights`: weights at fixed addresses, which captured graphs have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nano_inference.executors.staging import Pace
from nano_inference.executors.torch.weights import Bound, LiveTorchWeights, TorchStaged
from nano_inference.models.program import Program


class LiveCudaWeights(LiveTorchWeights[Bound]):
    """Weights on a device; an update is gathered in main memory and copied over them."""

    def __init__(self, program: Program, device: torch.device, dtype: torch.dtype, on_move: Callable[[], None]) -> None:
        """`on_move` is called before the weights leave their addresses."""
        super().__init__(program, device, dtype, Bound)
        self._on_move = on_move

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> TorchStaged:
        """Start filling new weights in main memory (pinned for CUDA); on the device if there are none yet."""
        if self._model is None:
            return super().stage(pace=pace, check_finite=check_finite)
        return TorchStaged(
            *(self._layout, self._model.weights, Bound, {}, torch.device("cpu"), self._dtype, pace),
            check_finite=check_finite,
            is_pinned=self.device.type == "cuda",
        )

    def commit(self, staged: Bound) -> None:
        """Copy the staged weights over the current ones; wait for the device, because staged memory may be reused."""
        if self._model is None:
            self._model = staged
        elif self._model is not staged:
            live = self._model.weights.stacks
            for name, stack in staged.weights.stacks.items():
                if stack is not live[name]:
                    live[name].copy_(stack, non_blocking=True)
            device = next(iter(live.values())).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def discard(self) -> None:
        self._on_move()
        super().discard()

    def move(self, device: torch.device) -> None:
        if self._model is not None and not self._model.weights.are_on(device):
            self._on_move()
            super().move(device)
