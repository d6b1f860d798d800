"""`Variant`: the compile-time constants of one kernel. The launchers and `configurations` make it the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

MOST_EARLY = 2048
"""Programs of a kernel that may start early: more would wait where the programs of the kernel before it could run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The constants and compiler options of one kernel."""

    constants: Mapping[str, int | bool]
    num_warps: int
    num_stages: int = 1
    fuses: bool = True
    """Contract products and sums to fused multiply-adds. Explicit: Triton's default differs between releases."""

    max_registers: int | None = None
    """Most registers of a thread, so that more programs fit a multiprocessor; None: the compiler decides."""

    def upcast(self) -> Variant:
        """Return the variant for the interpreter."""
        return replace(self, constants={**self.constants, "UPCAST": True})

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Start the kernel on a grid; `arguments` are those before the constants."""
        if 0 in grid:
            return
        kernel[grid](
            *arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=self.fuses,
            maxnreg=self.max_registers,
            **({"launch_pdl": True} if prod(grid) <= MOST_EARLY and starts_early(arguments[0].device) else {}),
        )


@lru_cache(maxsize=8)
def starts_early(device: torch.device) -> bool:
    """Return whether kernels on this device start while those before them end.

    Both the device and Triton's target must be Hopper or later: `language.begin_kernel` waits for the latter.
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and triton.runtime.driver.active.get_current_target().arch >= 90
    )


def padded(size: int) -> int:
    """Return the smallest power of two that is at least `size` and 16, the least width of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


def is_interpreted(tensor: Tensor) -> bool:
    """Return True if kernels on this tensor run in Triton's interpreter, whose bfloat16 products are wrong."""
    return tensor.device.type == "cpu"
