"""Weights at fixed addresses on a device: new ones are staged in main memory and copied over the old ones.

The addresses in captured graphs stay valid, and there is never a second model on the device.
"""

from __future__ import annotations

import torch

from nano_inference.executors.staging import Pace
from nano_inference.executors.torch.weights import Layout, TorchStaged, TorchWeights


def stage_weights(
    layout: Layout,
    live: TorchWeights | None,
    device: torch.device,
    dtype: torch.dtype,
    pace: Pace | None,
    *,
    check_finite: bool,
) -> TorchStaged:
    """Start filling new weights: on the device if there are none, else in main memory (pinned for CUDA)."""
    where = device if live is None else torch.device("cpu")
    is_pinned = live is not None and device.type == "cuda"
    return TorchStaged(
        *(layout, live, lambda weights: weights, {}, where, dtype, pace), check_finite=check_finite, is_pinned=is_pinned
    )


def install(live: TorchWeights, staged: TorchWeights) -> None:
    """Copy the stacks of `staged` that are not `live`'s own over them; waits for the device. Can be repeated."""
    for name, stack in staged.stacks.items():
        if stack is not live.stacks[name]:
            live.stacks[name].copy_(stack, non_blocking=True)
    device = next(iter(live.stacks.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the staged memory may be reused
