"""Large pieces of memory: on a CPU they come from NumPy, which asks the system for huge pages.

Filling 540 MB fresh from `torch.empty` took 0.25 s, fresh from `numpy.empty` 0.05 s (docs/log.md): the difference is
one page fault for every 4 KiB.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the operating system gives the memory page by page as it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return _from_bytes(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8), shape, dtype)


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory whose contents are not set."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _from_bytes(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8), shape, dtype)


def _from_bytes(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if not memory.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory).view(dtype).view(shape)
