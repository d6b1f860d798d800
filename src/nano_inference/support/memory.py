"""Large memory allocations on a CPU: separate mappings with huge pages where the system supports them.

Filling 540 MB took 0.25 s in a new `torch.empty` and 0.05 s in a new `numpy.empty`, which requests huge pages
(docs/decisions/0004-weight-staging.md): one page fault for each 4 KiB makes the difference. A separate mapping is
returned to the system when its last tensor is freed; malloc may keep memory that it took from its heap.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_LINE = 64
_MAPPED_FROM = 4 << 20  # minimum bytes of a separate mapping: smaller ones gain little from huge pages


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the operating system provides each page when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _MAPPED_FROM and sys.platform != "win32":
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system cannot map {num_bytes:,} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(mapping, dtype=dtype).view(shape)
    return _from_bytes(np.zeros(num_bytes, dtype=np.uint8), shape, dtype)


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _from_bytes(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8), shape, dtype)


class Slabs:
    """Allocates small tensors from larger slabs of zeroed memory on huge pages.

    A slab is freed with the last tensor in it. Reading weights from pages of 4 KiB is 10% slower, because of address
    translation (docs/performance.md).
    """

    def __init__(self, slab_bytes: int = 32 << 20, allocate: Callable[[int], Tensor] | None = None) -> None:
        """`allocate` returns a slab of so many zeros (uint8); None: on huge pages."""
        self._slab_bytes = slab_bytes
        self._allocate = allocate or (lambda size: lazy_zeros((size,), torch.uint8, torch.device("cpu")))
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return zeros (uint8), aligned to 64 bytes; a size above the slab size gets a separate slab."""
        skip = -self._rest.data_ptr() % _LINE
        if skip + num_bytes > self._rest.numel():
            size = max(self._slab_bytes, num_bytes + _LINE)
            self._rest = self._allocate(size)
            skip = -self._rest.data_ptr() % _LINE
        piece, self._rest = self._rest[skip : skip + num_bytes], self._rest[skip + num_bytes :]
        return piece


def _from_bytes(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if not memory.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory).view(dtype).view(shape)
