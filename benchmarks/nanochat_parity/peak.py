"""Compares a call with its matrix products with weights alone, at the peak of `torch.mm` in float32 on one thread.

Both engines compute these products in full, so they are most of a large call. The C kernels can exceed that peak.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from nano_inference.nanochat import GPT

SHAPES = ((256, 768, 3072), (1024, 1024, 1024), (512, 3072, 768))
"""Rows, inner size and columns of products that are near the peak."""
_REPEATS = 12


def peak_flops() -> float:
    """Return the most operations per second of CPU time that `torch.mm` reaches on one of `SHAPES`."""
    return max(_reached(*shape) for shape in SHAPES)


def _reached(rows: int, inner: int, columns: int) -> float:
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    out = torch.mm(a, b)
    best = 0.0
    for _ in range(_REPEATS):
        start = time.process_time()
        torch.mm(a, b, out=out)
        best = max(best, 2 * rows * inner * columns / (time.process_time() - start))
    return best


def product_flops(model: GPT, prompt: int, samples: int, tokens: int) -> int:
    """Return the operations of a call's products with weights, two for each weight and position.

    Computed once: the prompt, and the logits of its last position. Then all tokens of the samples but the last ones,
    after which nothing is drawn.
    """
    head = model.weights["lm_head.weight"].numel()
    layers = model.num_matmul_params() - head
    steps = samples * (tokens - 1)
    return 2 * (layers * (prompt + steps) + head * (1 + steps))


def compared_with_products(row: Mapping[str, Any], flops: int, peak: float) -> str:
    """Return one line on a row of the speed table: how much of its time the products take at least."""
    least = flops / peak
    return (
        f"d{row['depth']} n={row['samples']} top-k {row['top_k'] or '–'}: {flops / 1e9:.1f} GFLOP; products alone at "
        f"peak would take {least:.3f} s, which is {row['upstream'] / least:.2f}x; measured {row['ratio']:.2f}x, "
        f"{least / row['ours']:.0%} of the peak over the whole call"
    )
