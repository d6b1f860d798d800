"""`model_forward`: the logits of every token of a step."""

from __future__ import annotations

from torch import Tensor

from nano_inference.executors.cpu.store import KernelStore
from nano_inference.executors.protocol import Executor
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.store import KVStore


def model_forward(model: Executor, inputs: ForwardInput, cache: KVStore | KernelStore) -> Tensor:
    """Return float32 logits [T, V] of every token of a step, and write its K/V to the cache.

    `cache` is a `KVStore` for a torch executor, a `KernelStore` for the CPU kernels.
    """
    return model.forward(inputs, cache)
