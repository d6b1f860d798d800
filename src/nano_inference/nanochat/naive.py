"""Sampling of upstream's naive `GPT.generate`: candidates outside top-k get probability 0, then all ids are drawn from.

The engine's sampling (`columns.py`) draws from the top-k candidates only, so equal seeds give other tokens, and it has
exactly k candidates where this one keeps all that tie with the k-th.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.nanochat.columns import candidates


def sample_over_vocabulary(
    logits_BV: Tensor,
    rng: torch.Generator | None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Sample one token per row from logits [B, V]; return [B, 1] int64. A temperature of 0 or below is argmax.

    `top_k` of 0 or below is no filter. Raises `RuntimeError` for an infinite temperature with `top_k`, as upstream.
    """
    if top_k is not None and top_k > 0:
        kth_B1 = logits_BV.topk(min(top_k, logits_BV.size(-1)), dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if not temperature > 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    p_BV, _ = candidates(logits_BV, temperature, None, top_p)
    return torch.multinomial(p_BV, num_samples=1, generator=rng)
