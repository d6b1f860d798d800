"""The matrix product with few rows against float64, and against itself with other rows.

Shapes: T tokens, N outputs, K inputs, Z ranges of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.records import num_ranges, range_memory
from tests.cuda.case import Case, error


def product_of(
    kernels: Kernels, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, device: torch.device
) -> Tensor:
    """Return x Wᵀ + bias by the kernels."""
    num_out, num_in = weight_NK.shape
    memory = range_memory(num_ranges(num_out, num_in) * x_TK.size(0) * num_out, device)
    memory.part_ZTN.fill_(torch.nan)
    out = torch.full((x_TK.size(0), num_out + 3), torch.nan, dtype=x_TK.dtype, device=device)[:, :num_out]
    bias = None if bias_N is None else bias_N.to(device)
    for _ in range(2):  # the second needs what the first leaves in `done_I`
        out.fill_(torch.nan)
        kernels.multiply.multiply(out, x_TK.to(device), weight_NK.to(device), bias, memory)
    assert not memory.done_I.any()
    return out


def operands(num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_out)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((num_tokens, num_in), (num_out, num_in), (num_out,))
    )
    return x.to(dtype), (weight * num_in**-0.5).to(dtype), bias.to(dtype)


def difference(
    kernels: Kernels,
    num_tokens: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool = True,
) -> float:
    """Return the largest difference from float64."""
    x_TK, weight_NK, bias_N = operands(num_tokens, num_out, num_in, dtype)
    expected = x_TK.double() @ weight_NK.double().t() + (bias_N.double() if has_bias else 0)
    return error(product_of(kernels, x_TK, weight_NK, bias_N if has_bias else None, device), expected)


def row_dependence(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    """Return 0 if rows have the same bits without the rows after them, on a GPU also alone."""
    x_TK, weight_NK, bias_N = operands(8, 70, 1200, dtype)
    together = product_of(kernels, x_TK, weight_NK, bias_N, device)
    spans = [range(count) for count in (1, 3, 7)]
    spans += [range(row, row + 1) for row in range(8)] if device.type == "cuda" else []  # numpy's rows depend on place
    parts = [product_of(kernels, x_TK[one.start : one.stop], weight_NK, bias_N, device) for one in spans]
    return float(not all(torch.equal(together[s.start : s.stop], part) for s, part in zip(spans, parts, strict=True)))


def cases() -> Iterator[Case]:
    """Yield every case."""
    for num_tokens, num_out, num_in in ((1, 96, 576), (8, 70, 1200), (3, 33, 100), (5, 1060, 130), (16, 160, 896)):
        name = f"linear-{num_tokens}-{num_out}-{num_in}"
        shape = (num_tokens, num_out, num_in)
        yield Case(name, lambda k, d, s=shape: difference(k, *s, torch.float32, d), 2e-6)
        if num_out < 1000:
            yield Case(f"{name}-half", lambda k, d, s=shape: difference(k, *s, torch.float16, d, has_bias=False), 3e-3)
        yield Case(f"{name}-bfloat16", lambda k, d, s=shape: difference(k, *s, torch.bfloat16, d), 2e-2, needs_gpu=True)
    yield Case("linear-row-dependence", lambda k, d: row_dependence(k, d, torch.float32), 0.0)
    yield Case("linear-row-dependence-bfloat16", lambda k, d: row_dependence(k, d, torch.bfloat16), 0.0, needs_gpu=True)
