"""The bytes of the KV cache: one tensor for keys, one for values, all layers. Which block holds what, it never knows.

Shapes: L layers, S slots (blocks x block_size), T tokens of a step, K kv heads, D head size, N blocks, C slots a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nano_inference.types import BlockCopy


class KVStore:
    """Owns the K and V of every slot of every layer."""

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
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.k_LSKD = lazy_zeros(shape, dtype, device)
        self.v_LSKD = lazy_zeros(shape, dtype, device)
        self.k_layers = tuple(self.k_LSKD.unbind(0))
        self.v_layers = tuple(self.v_LSKD.unbind(0))
        self._k_blocks = tuple(k_SKD.view(num_blocks, -1) for k_SKD in self.k_layers)
        self._v_blocks = tuple(v_SKD.view(num_blocks, -1) for v_SKD in self.v_layers)

    def write(self, layer: int, slot_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put a step's keys and values into their slots."""
        self.k_layers[layer].index_copy_(0, slot_T, k_TKD)
        self.v_layers[layer].index_copy_(0, slot_T, v_TKD)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as [N, C*K*D], a block a row."""
        return self._k_blocks[layer], self._v_blocks[layer]

    def prepare(self, fresh: Sequence[int], copies: Sequence[BlockCopy]) -> None:
        """Clear fresh blocks, then copy the first slots of blocks into others.

        Every source is read before anything is written: a source may have been evicted and taken in this very step.
        Clearing matters because slots not yet written are read under a mask, and 0 · NaN would be NaN.
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
        """Return the first slots of blocks, given (block, how many) pairs."""
        slots = [block * self.block_size + i for block, count in parts for i in range(count)]
        return torch.tensor(slots, dtype=torch.int64, device=device)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the operating system gives the memory page by page as it is first written.

    Zeros, because slots never written are read under a mask, and 0 · NaN would be NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
