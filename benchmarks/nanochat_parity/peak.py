"""Compares a call with its matrix products with weights alone, at the peak of `torch.mm` in float32 on one thread.

Both engines compute these products, so they are most of a large call. The C kernels can exceed that peak.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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


def product_flops(model: GPT, prompt: int, lengths: Sequence[int]) -> int:
    """Return the operations of the products with weights that a call needs, two for each weight and position.

    `prompt`: its tokens that are computed, not those of a cached prefix; the last one needs logits. `lengths`: the
    tokens of each sample up to its terminal; nothing is drawn after the last, so it is not computed.
    """
    head = model.weights["lm_head.weight"].numel()
    layers = model.num_matmul_params() - head
    steps = sum(length - 1 for length in lengths)
    return 2 * (layers * (prompt + steps) + head * (1 + steps))


def compared_with_products(row: Mapping[str, Any], peak: float) -> str:
    """Return one line on a row of the speed table: how much of its time the products take at least."""
    least = row["flops"] / peak
    call = f"d{row['depth']} n={row['samples']} top-k {row['top_k'] or '–'}{', cached prompt' * row['cached']}"
    return (
        f"{call}: {row['flops'] / 1e9:.1f} GFLOP; products alone at peak would take {least:.3f} s, which is "
        f"{row['upstream'] / least:.2f}x; measured {row['ratio']:.2f}x, "
        f"{least / row['ours']:.0%} of the peak over the whole call"
    )
