"""The CUDA executor on a GPU: graphs against single launches, updates, memory, determinism; skipped without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.cuda_parts.models import TINY, config_of, open_on
from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.executors.cuda.decode import CapturedStepper, StepKey, Stepper
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import triton_kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.models import dense
from tests.cuda.engines import eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device"),
]
CUDA = torch.device("cuda")
PARAMS = [
    SamplingParams(max_tokens=40, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=40, seed=3, top_k=9, top_p=0.9, presence_penalty=0.3, raw_logprobs=True),
]


class Counting(CapturedStepper):
    """Counts the graphs that are recorded."""

    num_captured = 0

    def _captured(self, key: StepKey) -> torch.cuda.CUDAGraph:
        Counting.num_captured += 1
        return super()._captured(key)


def opened(stepper: Callable[..., Stepper] = CapturedStepper, **options: Any) -> InferenceEngine:
    config = EngineConfig(
        model_path="tiny", device="cuda", kv_cache_bytes=64 << 20, max_batch_size=32, max_model_len=1024, **options
    )
    limits = Limits(max_len=1024, max_rows=32, is_deterministic=config.deterministic)
    dtype = {"auto": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}[config.dtype]
    model = config_of(TINY)
    return open_on(CudaExecutor(model, dense.program(model), CUDA, dtype, triton_kernels(), limits, stepper), config)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    common = [rng.randrange(160) for _ in range(300)]
    return [[*common, rng.randrange(160)] for _ in range(6)] + [[rng.randrange(160) for _ in range(9)]] * 3


def bits(samples: list[TrainingSample]) -> Iterator[Any]:
    for sample in samples:
        yield sample.completion_tokens, sample.logprobs, sample.top_logprobs, sample.raw_logprobs


@pytest.mark.parametrize("dtype", ["float32", "auto", "float16"])
def test_captured_steps_equal_single_launches_to_the_bit(dtype: str) -> None:
    with opened(CapturedStepper, dtype=dtype) as engine:
        captured = engine.generate(prompts(), PARAMS * 3)
    with opened(eager, dtype=dtype) as engine:
        single = engine.generate(prompts(), PARAMS * 3)
    assert list(bits(captured)) == list(bits(single))


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_deterministic_results_do_not_depend_on_the_batch(dtype: str) -> None:
    with opened(CapturedStepper, dtype=dtype, deterministic=True) as engine:
        alone = []
        for prompt, params in zip(prompts(), PARAMS * 3, strict=True):
            alone += engine.generate([prompt], params)
            engine.flush_cache()
        assert list(bits(engine.generate(prompts(), PARAMS * 3))) == list(bits(alone))


def test_a_hundred_updates_neither_record_again_nor_need_more_memory() -> None:
    with opened(Counting) as engine:
        assert isinstance(engine.parts.executor, CudaExecutor)
        weights = {name: value.clone() for name, value in engine.parts.executor.weights.values()}
        engine.generate(prompts(), PARAMS * 3)
        before = Counting.num_captured, torch.cuda.memory_allocated()
        for _ in range(100):
            engine.update_weights(weights, blocking=True)
            engine.generate(prompts(), PARAMS * 3)
        assert (Counting.num_captured, torch.cuda.memory_allocated()) == before
