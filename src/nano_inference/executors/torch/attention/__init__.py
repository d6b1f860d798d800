"""Attention over paged K/V: backends that satisfy `Backend`; `pick` returns one by name."""

from __future__ import annotations

import torch

from nano_inference.config import AttentionName
from nano_inference.executors.torch.attention.context import AttentionSpec, Backend, StepContext
from nano_inference.executors.torch.attention.flex import FlexAttentionBackend
from nano_inference.executors.torch.attention.masks import create_attention_mask, create_sliding_window_causal_mask
from nano_inference.executors.torch.attention.sdpa import SdpaBackend

__all__ = [
    "AttentionSpec",
    "Backend",
    "FlexAttentionBackend",
    "SdpaBackend",
    "StepContext",
    "create_attention_mask",
    "create_sliding_window_causal_mask",
    "pick",
]


def pick(name: AttentionName, device: torch.device) -> Backend:
    """Return the backend called `name`; "auto" is SDPA."""
    if name == "flex":
        return FlexAttentionBackend(compile_kernel=device.type == "cuda")
    return SdpaBackend()
