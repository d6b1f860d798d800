"""What the executor launches on a GPU, without one: the Triton launchers on CUDA tensors that have no values.

A torch operation on tensors of two devices raises, and every launch is recorded instead of started.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.cuda_parts.models import SHAPES, Shape, config_of
from nano_inference.core.step import Row, RowState
from nano_inference.executors.cuda.decode import EagerStepper, StepKey
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import triton_kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.sources import TensorSource
from nano_inference.models.config import ModelConfig
from nano_inference.models.families import program_of
from nano_inference.types import SamplingParams
from tests.cuda.engines import eager
from tests.cuda.fake_cuda import CUDA, DeviceLaunchesOnly, Products, Transfers
from tests.cuda.models import write_model
from tests.rows import make_row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="NO TRITON: pip install -e '.[aot]' (286 MB)"
    ),
]
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}
KEYS = (
    StepKey(256, 16, True, True, True),
    StepKey(256, 16, False, False, False),
    StepKey(16, 1, True, False, False),
    StepKey(1, 2, False, True, False),
    StepKey(2, 1, False, False, False, has_adapters=True),
)
KERNELS = {
    *("embed_block", "norm_row", "rotate_heads", "activate_block", "mix_block", "multiply_range"),
    *("attend_group", "attend_split", "merge_split", "load_rows", "adjust_chunk", "cut_row", "sum_chunk", "draw_row"),
    *("top_row", "advance_rows", "multiply_norm", "attend_row", "shrink_row", "expand_block"),
}
"""Those of the windows of dense models."""
HYBRID = "plain"
FEWER_KERNELS = {"gemma2": {"attend_row"}, "G4": {"multiply_norm"}}
"""A soft cap of scores, and sums with factors, are not fused."""
MORE_KERNELS = {
    "G4": {"gate_values_block", "smear_block"},
    HYBRID: {"convolve_row", "advance_state", "gated_norm_heads", "gate_block", "arrange_block"},
}
NAMES = (*SHAPES, "gemma2", *MORE_KERNELS)
Launched = tuple[str, tuple[Any, ...], tuple[str, ...]]
"""A kernel, its variant, and the types of its arguments before the constants."""


def variant_key(variant: Any) -> tuple[Any, ...]:
    options = (variant.num_warps, variant.num_stages, variant.fuses, variant.max_registers)
    return (tuple(sorted(variant.constants.items())), *options)


SMALL = Shape(20_000, 64, 128, 1, 4, 2, 16, has_bias=True)
"""A model whose sampler has more than `variant.MOST_EARLY` programs for 256 rows."""
LIMITS = Limits(max_len=4096, max_rows=256, max_tokens=4096)


@pytest.fixture(scope="module")
def compiled() -> frozenset[Launched]:
    """Everything that `make aot` compiles."""
    from scripts.configurations import configurations

    found = ((one, [text for text in one.signature.values() if text != "constexpr"]) for one in configurations())
    return frozenset((one.kernel_name, variant_key(one.variant), tuple(types)) for one, types in found)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Launched]:
    """What was launched since the start of the test, instead of being started."""
    from nano_inference.executors.cuda.kernels.variant import Variant

    found: set[Launched] = set()

    def launch(variant: Variant, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        assert all(one.device == CUDA for one in arguments if isinstance(one, Tensor)), kernel.__name__
        assert sorted(kernel.arg_names[len(arguments) :]) == sorted(variant.constants), kernel.__name__
        found.add((kernel.__name__, variant_key(variant), tuple(map(type_of, arguments))))

    monkeypatch.setattr(Variant, "launch", launch)
    return found


def type_of(argument: Tensor | float) -> str:
    """Return the type of an argument, as Triton writes it."""
    if isinstance(argument, Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def written(name: str, directory: Path) -> ModelConfig:
    """Return the configuration of a published model with two layers, or of a tiny one."""
    if name in SHAPES:
        return config_of(replace(SHAPES[name], num_layers=2))
    write_model(name, directory)
    return open_checkpoint(directory).config


@contextmanager
def opened(config: ModelConfig, *, is_deterministic: bool) -> Iterator[CudaExecutor]:
    """Yield an executor without values."""
    program = program_of(config)
    limits = Limits(max_len=4096, max_rows=256, max_tokens=2048, is_deterministic=is_deterministic)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with Transfers():
            executor = CudaExecutor(config, program, CUDA, torch.bfloat16, triton_kernels(), limits, eager)
            load_weights(executor, {spec.name: TensorSource(torch.empty(spec.shape)) for spec in program.weights})
            executor.cache.allocate(CacheSize(num_blocks=1000, block_size=16, num_states=5))
            executor.commit_adapter(1, {})
        yield executor


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", NAMES)
def test_windows_launch_compiled_kernels_on_the_device_and_nothing_else(
    name: str, is_deterministic: bool, launched: set[Launched], compiled: frozenset[Launched], tmp_path: Path
) -> None:
    with opened(written(name, tmp_path), is_deterministic=is_deterministic) as executor:
        with Transfers():
            step = executor.memory.decode_step(executor.store)
        with Products(), DeviceLaunchesOnly():
            for key in KEYS:
                step.run(key)
    assert launched <= compiled, launched - compiled
    assert {kernel for kernel, *_ in launched} == KERNELS - FEWER_KERNELS.get(name, set()) | MORE_KERNELS.get(
        name, set()
    )


def test_deterministic_windows_of_few_rows_launch_the_same_kernels(launched: set[Launched], tmp_path: Path) -> None:
    found = []
    for is_deterministic in (False, True):
        launched.clear()
        with opened(written("Qwen2.5-0.5B", tmp_path), is_deterministic=is_deterministic) as executor:
            with Transfers():
                step = executor.memory.decode_step(executor.store)
            for key in (StepKey(16, 8, False, False, True), StepKey(1, 8, False, False, False)):
                step.run(key)
        found.append(frozenset(launched))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", NAMES)
def test_passes_launch_compiled_kernels_on_the_device(
    name: str, is_deterministic: bool, launched: set[Launched], compiled: frozenset[Launched], tmp_path: Path
) -> None:
    sizes = (1, 1, 1, 300, 20)
    place = {"prev_token": 1, "start": 600, "blocks": tuple(range(60)), "num_sampled": 1}
    rows = tuple(make_row(i, (1,) * size, state=RowState(i, i), adapter=i % 2, **place) for i, size in enumerate(sizes))
    config = written(name, tmp_path)
    with opened(config, is_deterministic=is_deterministic) as executor, Transfers():
        hidden_KE = executor.hidden(rows, (0, 1, 2, 302, 322))
        logits_KV = executor.logits(hidden_KE)
        assert logits_KV.shape == (5, config.vocab_size) and logits_KV.device == CUDA
    assert launched <= compiled, launched - compiled
    assert ("attend_chunk" in {kernel for kernel, *_ in launched}) is not is_deterministic


class Warmed(EagerStepper):
    """Runs steps in advance, as a stepper for CUDA does."""

    def warm_up(self, keys: list[StepKey], progress: Callable[[int, int], None]) -> None:
        for key in keys:
            self.replay(key)


def forms(kernel: Any, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """Return how Triton distinguishes each argument: by type, and whether a number is 1 or a multiple of 16."""

    def form(name: str, argument: Tensor | float) -> str:
        if isinstance(argument, Tensor | float) or name in kernel.do_not_specialize:
            return type_of(argument)
        return "1" if argument == 1 else "i32 of 16s" if argument % 16 == 0 else "i32"

    return tuple(form(name, one) for name, one in zip(kernel.arg_names, arguments, strict=False))


def rows_of(count: int, size: int, start: int, params: SamplingParams) -> tuple[Row, ...]:
    """Return rows of `size` tokens on blocks that all of them share."""
    place = {"prev_token": 1 if start else -1, "start": start, "blocks": tuple(range(256)), "num_sampled": 1}
    return tuple(make_row(i, (1,) * size, params=params, state=RowState(i, i), **place) for i in range(count))


PLAIN = SamplingParams()
REQUESTS = {
    "a prompt": rows_of(1, 7, 0, PLAIN),
    "a prompt of 16 tokens": rows_of(1, 16, 0, PLAIN),
    "a long prompt": rows_of(1, 3000, 0, PLAIN),
    "the next part of a prompt": rows_of(1, 100, 900, SamplingParams(temperature=0)),
    "many prompts": rows_of(20, 200, 0, SamplingParams(top_k=5)),
    "many prompts with log-probabilities": rows_of(200, 3, 0, SamplingParams(logprobs=3)),
    "a window": rows_of(1, 1, 9, PLAIN),
    "a window of three rows with top-p": rows_of(3, 1, 100, SamplingParams(top_p=0.5)),
    "a window of many rows": rows_of(250, 1, 255, SamplingParams(frequency_penalty=1.0)),
    "a window of rows that share a prefix": rows_of(30, 1, 600, PLAIN),
    "many rows that share a long prefix": rows_of(256, 1, 4000, SamplingParams(min_p=0.1, logprobs=20)),
}


@pytest.mark.parametrize(
    ("name", "max_rows", "deterministic"),
    [("small", 256, False), ("small", 256, True), ("small", 8, False), (HYBRID, 256, False)],
)
def test_nothing_is_compiled_after_the_start(
    name: str, max_rows: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compilation takes half a second, in which all requests wait."""
    from nano_inference.executors.cuda.kernels.variant import MOST_EARLY, Variant

    found: set[tuple[Any, ...]] = set()

    def launch(variant: Variant, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        is_early = prod(grid) <= MOST_EARLY
        found.add((kernel.__name__, is_early, variant_key(variant), forms(kernel, arguments)))

    monkeypatch.setattr(Variant, "launch", launch)
    config = config_of(SMALL) if name == "small" else written(name, tmp_path)
    limits = replace(LIMITS, max_rows=max_rows, is_deterministic=deterministic)
    program = program_of(config)

    def stepper(step: Callable[[StepKey], None], device: torch.device) -> Warmed:
        return Warmed(step)

    executor = CudaExecutor(config, program, torch.device("cpu"), torch.bfloat16, triton_kernels(), limits, stepper)
    load_weights(executor, {spec.name: TensorSource(torch.zeros(spec.shape)) for spec in program.weights})
    executor.cache.allocate(CacheSize(num_blocks=300, block_size=16, num_states=256))
    executor.warm_up(lambda done, total: None)
    warm = frozenset(found)
    for request, rows in REQUESTS.items():
        executor.run(rows, (), ())
        assert found <= warm, f"{request}: {sorted(str(one[:3]) for one in found - warm)}"
