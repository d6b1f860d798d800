"""Cases of functions that only Triton kernels call. Shapes: B rows, C rows of a block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.sampler import uniform_of
from nano_inference.executors.cuda.launchers import Kernels
from tests.cuda.case import Case
from tests.cuda.sampler_cases import uniform_arguments, uniforms_differ


@triton.jit
def _uniforms(seed_B: tl.tensor, sample_B: tl.tensor, position_B: tl.tensor, out_B: tl.tensor, C: tl.constexpr) -> None:
    at_C = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(out_B + at_C, uniform_of(tl.load(seed_B + at_C), tl.load(sample_B + at_C), tl.load(position_B + at_C)))


def uniform_error(kernels: Kernels, device: torch.device) -> float:
    """Return the number of uniforms whose bits differ from `sampling.uniform`."""
    del kernels
    out_B = torch.empty(512, dtype=torch.float64, device=device)
    _uniforms[(4,)](*(one.to(device) for one in uniform_arguments()), out_B, C=128)
    return uniforms_differ(out_B)


def cases() -> Iterator[Case]:
    """Yield every case."""
    yield Case("sampler-uniform-bits", uniform_error, 0.0)
