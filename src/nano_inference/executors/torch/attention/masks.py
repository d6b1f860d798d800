"""Explicit causal and sliding-window masks: the reference for every backend.

Shapes: Q queries, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.support.checks import check_int


def create_attention_mask(query_position_Q: Tensor, key_position_K: Tensor, window: int | None = None) -> Tensor:
    """Return [Q, K] bool: True where the key is at or before the query, and among its latest `window` keys.

    The window includes the query's own key. Raises `ValueError` if it is less than 1.
    """
    distance_QK = query_position_Q.unsqueeze(-1) - key_position_K.unsqueeze(0)
    mask_QK = distance_QK >= 0
    if window is not None:
        check_int("window", window, 1)
        mask_QK &= distance_QK < window
    return mask_QK


def create_sliding_window_causal_mask(
    num_queries: int, window: int, *, num_keys: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return [num_queries, num_keys] bool; the queries are the last of `num_keys` positions (default: all)."""
    num_keys = num_queries if num_keys is None else num_keys
    if num_keys < num_queries:
        raise ValueError(f"num_keys must be at least num_queries ({num_queries}), got {num_keys}")
    query_Q = torch.arange(num_keys - num_queries, num_keys, device=device)
    return create_attention_mask(query_Q, torch.arange(num_keys, device=device), window)
