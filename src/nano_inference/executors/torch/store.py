"""KV cache memory: one tensor for keys and one for values of all layers.

Shapes: L layers, S slots (blocks x block_size), T tokens of a step, K kv heads, D head size, N blocks, C slots per
block, X elements per block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.core.step import BlockCopy
from nano_inference.executors.states import StateSlots
from nano_inference.support.memory import lazy_zeros


class KVStore:
    """Owns the K and V of every slot of every layer, and the slots of recurrent states."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._shape = (num_layers, num_blocks, block_size * num_kv_heads * head_dim)
        self._heads = (num_kv_heads, head_dim)
        self._dtype = dtype
        self._device = device
        self.states: StateSlots | None = None  # of a program with recurrent states
        self._make(self._shape)

    def restore(self) -> None:
        """Allocate the memory, zeroed."""
        self._make(self._shape)
        if self.states is not None:
            self.states.restore()

    def free(self) -> None:
        """Free the memory; the store is unusable until `restore`."""
        num_layers, _, block_elements = self._shape
        self._make((num_layers, 0, block_elements))
        if self.states is not None:
            self.states.free()

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def num_bytes(self) -> int:
        """Return the allocated bytes of keys, values and states."""
        num_states = 0 if self.states is None else self.states.num_bytes
        return self.k_LSKD.nbytes + self.v_LSKD.nbytes + num_states

    def _make(self, shape: tuple[int, int, int]) -> None:
        slots = (shape[0], shape[1] * self.block_size, *self._heads)
        k_LNX, v_LNX = (lazy_zeros(shape, self._dtype, self._device) for _ in range(2))
        self.k_LSKD, self.v_LSKD = k_LNX.view(slots), v_LNX.view(slots)
        self.k_layers, self.v_layers = tuple(self.k_LSKD.unbind(0)), tuple(self.v_LSKD.unbind(0))
        self._k_blocks, self._v_blocks = tuple(k_LNX.unbind(0)), tuple(v_LNX.unbind(0))

    def write(self, layer: int, slot_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write a step's keys and values to their slots."""
        self.k_layers[layer].index_copy_(0, slot_T, k_TKD)
        self.v_layers[layer].index_copy_(0, slot_T, v_TKD)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as [N, C * K * D], one block per row."""
        return self._k_blocks[layer], self._v_blocks[layer]

    def prepare(self, fresh: Sequence[int], copies: Sequence[BlockCopy]) -> None:
        """Clear fresh blocks, then copy the first slots of blocks into others.

        All sources are read before any write, because an evicted source may be among the fresh blocks. Fresh blocks
        are cleared because unwritten slots are read with weight 0, and 0 · NaN is NaN.
        """
        device = self.k_LSKD.device
        fresh_S = self._slots([(block, self.block_size) for block in fresh], device)
        source_S = self._slots([(c.source, c.num_tokens) for c in copies], device)
        target_S = self._slots([(c.target, c.num_tokens) for c in copies], device)
        for cache_LSKD in (self.k_LSKD, self.v_LSKD):
            copied_LSKD = cache_LSKD.index_select(1, source_S) if copies else None
            if fresh:
                cache_LSKD.index_fill_(1, fresh_S, 0)
            if copied_LSKD is not None:
                cache_LSKD.index_copy_(1, target_S, copied_LSKD)

    def _slots(self, parts: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        slots = [block * self.block_size + i for block, count in parts for i in range(count)]
        return torch.tensor(slots, dtype=torch.int64, device=device)
