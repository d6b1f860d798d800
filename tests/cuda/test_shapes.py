"""Windows at the sizes of published models, on tensors without values."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nano_inference.executors.cuda.decode import StepKey
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import plain_kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize
from nano_inference.loader.sources import TensorSource
from nano_inference.models import dense
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from tests.cuda.engines import CPU


class Shape(NamedTuple):
    """The sizes of a published model's layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "Qwen2.5-0.5B": Shape(151936, 896, 4864, 14, 2, 64),
    "Llama-3.2-1B": Shape(128256, 2048, 8192, 32, 8, 64),
    "Qwen2.5-7B": Shape(152064, 3584, 18944, 28, 4, 128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_windows_of_published_models_need_no_data(name: str) -> None:
    """Fake tensors have shapes and no values: an operation that reads one, or copies it to the host, raises."""
    shape = SHAPES[name]
    config = ModelConfig(
        architecture="Shape", family="dense", vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, layers=(LayerConfig(rope=0),) * 3, max_positions=4096,
        ropes=(RopeConfig(rotary_dim=shape.head_dim, theta=1e6),), qkv_bias=name.startswith("Qwen"),
    )  # fmt: skip
    program = dense.program(config)
    limits = Limits(max_len=4096, max_rows=256, max_tokens=2048)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the cache is mapped memory, never touched
        executor = CudaExecutor(config, program, CPU, torch.bfloat16, plain_kernels(), limits)
        load_weights(executor, {spec.name: TensorSource(torch.empty(spec.shape)) for spec in program.weights})
        executor.new_cache(CacheSize(num_blocks=1000, block_size=16))
        step = executor.memory.decode_step(executor.store)
        for key in (StepKey(256, 16, True, True, True), StepKey(1, 2, False, False, False)):
            step.run(key)
        logits_BV = step.model.machine.registers.read(step.model.head.result, 256)
        assert logits_BV.shape == (256, shape.vocab_size) and logits_BV.dtype == torch.bfloat16
