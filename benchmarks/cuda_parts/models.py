"""Models with random weights at the sizes of published ones, and engines for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.build import parts_of
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.loading import load_weights
from nano_inference.loading.sources import TensorSource
from nano_inference.models import dense
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program

MAX_LEN = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a published model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool = False
    has_head_norm: bool = False
    is_tied: bool = True


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "Qwen2.5-0.5B": Shape(151936, 896, 4864, 24, 14, 2, 64, has_bias=True),
        "Qwen3-0.6B": Shape(151936, 1024, 3072, 28, 16, 8, 128, has_head_norm=True),
        "Llama-3.2-1B": Shape(128256, 2048, 8192, 16, 32, 8, 64),
        "Qwen2.5-7B": Shape(152064, 3584, 18944, 28, 28, 4, 128, has_bias=True, is_tied=False),
    }
)
TINY = Shape(160, 48, 80, 2, 6, 2, 16, has_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how large everything runs."""

    device: torch.device
    kernels: Kernels
    dtype: torch.dtype
    is_dry: bool

    def shape(self, name: str) -> Shape:
        """Return a model's sizes; tiny ones in a dry run."""
        return TINY if self.is_dry else SHAPES[name]

    def sized(self, size: int, dry: int) -> int:
        """Return a number, or a small one in a dry run."""
        return dry if self.is_dry else size

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def config_of(shape: Shape) -> ModelConfig:
    """Return the configuration of a model."""
    return ModelConfig(
        architecture="Random",
        family="dense",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        layers=(LayerConfig(rope=0),) * shape.num_layers,
        ropes=(RopeConfig(rotary_dim=shape.head_dim, theta=1e6),),
        max_positions=MAX_LEN,
        tie_embeddings=shape.is_tied,
        qkv_bias=shape.has_bias,
        qk_norm=shape.has_head_norm,
    )


def random_weight(spec: WeightSpec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a random matrix, or a vector of ones with noise."""
    values = torch.randn(spec.shape, device=device, dtype=dtype)
    return values * 0.02 if spec.kind == "matrix" else values * 0.1 + 1


def open_random(
    bench: Bench, name: str, *, reads_prefixes_once: bool = True, is_deterministic: bool = False
) -> InferenceEngine:
    """Return an engine on a model with random weights, with its usual graphs captured."""
    model = config_of(bench.shape(name))
    choices = {"reads_prefixes_once": reads_prefixes_once, "is_deterministic": is_deterministic}
    return open_program(bench, model, dense.program(model), load_random, **choices)


def open_program(
    bench: Bench,
    model: ModelConfig,
    program: Program,
    load: Callable[[CudaExecutor], None],
    *,
    reads_prefixes_once: bool = True,
    is_deterministic: bool = False,
) -> InferenceEngine:
    """Return an engine on a program whose weights `load` puts in place, with its usual graphs captured."""
    config = EngineConfig(
        model_path=model.architecture,
        device=str(bench.device),
        max_batch_size=bench.sized(256, 8),
        max_model_len=bench.sized(MAX_LEN, 512),
        kv_cache_bytes=16 << 20 if bench.is_dry else None,
        max_tokens_per_batch=bench.sized(8192, 64),
    )
    limits = Limits(
        max_len=config.max_model_len,
        max_rows=config.max_batch_size,
        max_tokens=config.max_tokens_per_batch,
        is_deterministic=is_deterministic,
        reads_prefixes_once=reads_prefixes_once,
    )
    executor = CudaExecutor(model, program, bench.device, bench.dtype, bench.kernels, limits)
    engine = open_on(executor, config, load)
    executor.warm_up(lambda done, total: None)
    return engine


def load_random(executor: CudaExecutor) -> None:
    """Make an executor's weights random numbers that are the same each time."""
    torch.manual_seed(0)
    load_weights(executor, {name: TensorSource(value) for name, value in random_weights(executor)})


def open_on(
    executor: CudaExecutor, config: EngineConfig, load: Callable[[CudaExecutor], None] = load_random
) -> InferenceEngine:
    """Return an engine on an executor whose weights `load` puts in place."""
    load(executor)
    return InferenceEngine(config, parts=parts_of(executor, config))


def random_weights(executor: CudaExecutor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight), on the executor's device."""
    for spec in executor.program.weights:
        yield spec.name, random_weight(spec, executor.device, executor.dtype)


def executor_of(engine: InferenceEngine) -> CudaExecutor:
    """Return the executor of an engine that `open_random` made."""
    executor = engine.parts.executor
    assert isinstance(executor, CudaExecutor)
    return executor
