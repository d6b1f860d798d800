"""The memory of recurrent states, and the slots that a row writes.

Shapes: Z slots, F floats of a slot.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nano_inference.core.step import RowState
from nano_inference.models.program import Program
from nano_inference.support.memory import lazy_zeros


class StateSlots:
    """Owns the states of every slot (`core.step.RowState`): float32 [Z, F], those of `Program.states` in order."""

    def __init__(self, program: Program, num_slots: int, device: torch.device) -> None:
        self._program, self._num_slots, self._device = program, num_slots, device
        self.restore()

    def restore(self) -> None:
        """Allocate the memory."""
        self._make(self._num_slots)

    def free(self) -> None:
        """Free the memory; the slots are unusable until `restore`."""
        self._make(0)

    def _make(self, num_slots: int) -> None:
        shape = (num_slots, self._program.state_bytes // 4)
        self.slots_ZF = lazy_zeros(shape, torch.float32, self._device)
        self.views: list[Tensor] = []  # [Z, *shape] of each state
        start = 0
        for state in self._program.states:
            end = start + math.prod(state.shape)
            self.views.append(self.slots_ZF[:, start:end].view(num_slots, *state.shape))
            start = end

    @property
    def num_bytes(self) -> int:
        return self.slots_ZF.nbytes


def ends_of(state: RowState, end: int) -> list[tuple[int, int]]:
    """Return (number of tokens, slot) of each write of a row that ends at `end`, ascending; its own slot comes last."""
    return [*(save for save in state.saves if save[0] <= end), (end, state.slot)]
