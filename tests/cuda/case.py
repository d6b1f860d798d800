"""`Case`: one comparison of launchers with a reference: plain torch, Triton's interpreter, or a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cuda.launchers import Kernels

DEVICE_SLACK = 4.0
"""Factor of bounds on a GPU: tensor cores and fused operations round differently from numpy; 0 stays 0."""


class Case(NamedTuple):
    """A comparison."""

    name: str
    run: Callable[[Kernels, torch.device], float]
    """Returns the largest difference of an implementation on a device."""
    bound: float
    needs_gpu: bool = False
    """The interpreter rounds to bfloat16 by truncation."""


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinity if shapes differ, or NaN or infinity are in different places."""
    found, expected = found.cpu().double(), expected.cpu().double()
    if found.shape != expected.shape:
        return float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (found - expected).abs())
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
