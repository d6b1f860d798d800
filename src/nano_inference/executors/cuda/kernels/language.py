"""Functions that several kernels share. Shapes are those of the caller."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def begin_kernel() -> None:
    """Start a kernel: every kernel calls it before it reads or writes memory.

    On a Hopper GPU or a later one, a kernel with few programs starts while the one before it ends (programmatic
    dependent launch): it waits here until that one and its writes are complete, and lets the next one do the same.
    """
    if not IS_INTERPRETED and cuda_capability_geq(9):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """Return a b in float32; `UPCAST` widens both first (the interpreter's bfloat16 products are wrong)."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh(x), float32: a series below 0.25, where the quotient of exponentials loses digits."""
    power = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - power) / (1.0 + power)
    square = x * x
    series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -large, large))


@triton.jit
def capped(x: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap · tanh(x / cap)."""
    return cap * tanh(x / cap)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return 1 / (1 + e^-x), float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def rounded(x: tl.tensor, pointer: tl.tensor) -> tl.tensor:
    """Return float32 values rounded to the precision of the memory at `pointer`, as float32."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def mix64(state: tl.tensor) -> tl.tensor:
    """Return one step of splitmix64 on uint64 (`sampling.uniform`)."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)
