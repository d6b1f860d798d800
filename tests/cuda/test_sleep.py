"""Executors on CUDA tensors without values: sleep returns memory that torch would keep to the driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.cuda_parts.models import TINY, config_of
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.torch.attention import SdpaBackend
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.sources import TensorSource
from nano_inference.models import dense
from tests.cuda.fake_cuda import CUDA, Transfers
from tests.cuda.plain import plain_kernels

CONFIG = config_of(TINY)
PROGRAM = dense.program(CONFIG)


def cuda_executor() -> Executor:
    return CudaExecutor(CONFIG, PROGRAM, CUDA, torch.float32, plain_kernels(), Limits(max_len=64))


def torch_executor() -> Executor:
    return TorchExecutor(CONFIG, PROGRAM, CUDA, torch.float32, SdpaBackend())


@pytest.mark.parametrize("new", [cuda_executor, torch_executor])
def test_freed_memory_returns_to_the_driver(new: Callable[[], Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int, str]] = []
    with FakeTensorMode(allow_non_fake_inputs=True), Transfers():
        executor = new()
        load_weights(executor, {spec.name: TensorSource(torch.empty(spec.shape)) for spec in PROGRAM.weights})
        executor.cache.allocate(CacheSize(num_blocks=4, block_size=16))

        def note() -> None:
            device = (
                next((value.device.type for _, value in executor.weights.values()), "")
                if executor.weights.num_bytes
                else ""
            )
            held.append((executor.cache.num_bytes, executor.weights.num_bytes, device))

        monkeypatch.setattr(torch.cuda, "empty_cache", note)
        size = executor.weights.num_bytes
        executor.free_cache()
        executor.weights.move(torch.device("cpu"))
        executor.weights.discard()
    assert size > 0 and held == [(0, size, "cuda"), (0, size, "cpu"), (0, 0, "")]
