"""Large pieces of memory: on a CPU each is a mapping of its own, on huge pages where the system has them.

Filling 540 MB fresh from `torch.empty` took 0.25 s, fresh from `numpy.empty`, which asks for huge pages, 0.05 s
(docs/decisions/0004-weight-staging.md): the difference is one page fault for every 4 KiB. A mapping of its own goes
back to the system when its last tensor does; malloc may take a large piece out of its heap, and then keeps it.
"""

from __future__ import annotations

import math
import mmap
import sys

import numpy as np
import torch
from torch import Tensor

_LINE = 64
_MAPPED_FROM = 4 << 20
"""Bytes from which a piece is mapped: smaller ones gain little from huge pages."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the operating system gives the memory page by page as it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _MAPPED_FROM and sys.platform != "win32":
        return torch.frombuffer(_mapping(num_bytes), dtype=dtype).view(shape)
    return _from_bytes(np.zeros(num_bytes, dtype=np.uint8), shape, dtype)


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory whose contents are not set."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _from_bytes(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8), shape, dtype)


class Slabs:
    """Owns slabs of zeroed memory on huge pages, and cuts pieces that would be too small for one out of them.

    A slab goes when the last of its pieces does. Weights spread over pages of 4 KiB are read a tenth slower
    (docs/decisions/0010-kernel-memory.md): each page is looked up anew in every step.
    """

    def __init__(self, slab_bytes: int = 32 << 20) -> None:
        self._slab_bytes = slab_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return that many zeros (uint8) from a multiple of 64 on; a piece larger than a slab gets one of its own."""
        skip = -self._rest.data_ptr() % _LINE
        if skip + num_bytes > self._rest.numel():
            size = max(self._slab_bytes, num_bytes + _LINE)
            self._rest = lazy_zeros((size,), torch.uint8, torch.device("cpu"))
            skip = -self._rest.data_ptr() % _LINE
        piece, self._rest = self._rest[skip : skip + num_bytes], self._rest[skip + num_bytes :]
        return piece


def _mapping(num_bytes: int) -> mmap.mmap:
    """Map zeros; the mapping lasts as long as a buffer of it. Raises MemoryError when the system refuses it."""
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system does not map {num_bytes:,} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _from_bytes(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if not memory.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory).view(dtype).view(shape)
