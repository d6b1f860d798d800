"""Memory of a GPU: what sleep gives back, and what penalties and updates need beside it; skipped without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.cuda_parts.models import SHAPES, config_of, executor_of, open_on
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import triton_kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.models import dense
from tests.gpu.test_executor import CUDA, PARAMS, bits, opened, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device"),
]
MAX_LEN = 32_768
"""With 64 rows more keys than fit into 141 GB."""
NEW = torch.tensor(0.001).bfloat16()


@pytest.mark.parametrize("discard_weights", [False, True])
def test_sleep_gives_memory_back_to_the_driver(discard_weights: bool) -> None:
    with opened() as engine:
        weights = {name: value.cpu() for name, value in executor_of(engine).weights.values()}
        before = engine.generate(prompts(), PARAMS * 3)
        cache = executor_of(engine).cache.num_bytes
        assert cache
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        engine.sleep(discard_weights=discard_weights)
        assert torch.cuda.mem_get_info()[0] >= free + cache
        engine.wake()
        if discard_weights:
            engine.update_weights(weights, blocking=True)
        assert list(bits(engine.generate(prompts(), PARAMS * 3))) == list(bits(before))


def test_penalties_biases_and_truncation_in_every_row_need_no_more_memory() -> None:
    params = [
        SamplingParams(max_tokens=20, seed=seed, ignore_eos=True, presence_penalty=0.5, logit_bias={3: 1.0}, top_k=20)
        for seed in range(32)
    ]
    plain = [dataclasses.replace(one, presence_penalty=0.0, logit_bias={}) for one in params]
    with opened(lookahead=1) as engine:  # the same steps in both
        engine.generate([[1, 2, 3]] * 32, plain)
        before = torch.cuda.memory_allocated()
        engine.generate([[1, 2, 3]] * 32, params)
        assert torch.cuda.memory_allocated() == before


def open_7b() -> InferenceEngine:
    """Return an engine with random weights and the largest cache that utilisation 0.9 allows."""
    config = EngineConfig(
        model_path="7B", device="cuda", gpu_memory_utilization=0.9, max_batch_size=64, max_model_len=MAX_LEN,
        max_tokens_per_batch=2048,
    )  # fmt: skip
    limits = Limits(max_len=MAX_LEN, max_rows=64, max_tokens=2048)
    model = dataclasses.replace(config_of(SHAPES["Qwen2.5-7B"]), max_positions=MAX_LEN)
    executor = CudaExecutor(model, dense.program(model), CUDA, torch.bfloat16, triton_kernels(), limits)
    return open_on(executor, config)


def constants(engine: InferenceEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield new weights that need no memory: all values are the same."""
    for spec in executor_of(engine).program.weights:
        yield spec.name, NEW.expand(spec.shape)


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that tensors took while `work` ran."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 40 << 30, reason="needs a GPU of 40 GiB"
)
def test_an_update_of_a_7b_model_needs_no_memory_at_utilisation_09() -> None:
    """With the cache in all memory that is left, and requests: peak and addresses are those without an update."""
    asked, params = [[7 + row] * 100 for row in range(64)], SamplingParams(max_tokens=64, seed=1, ignore_eos=True)
    with open_7b() as engine:
        _, total = torch.cuda.mem_get_info()
        assert torch.cuda.memory_allocated() > 0.8 * total
        engine.generate(asked, params)
        engine.flush_cache()
        quiet = peak_of(lambda: engine.generate(asked, params))
        engine.flush_cache()
        addresses = {name: value.data_ptr() for name, value in executor_of(engine).weights.values()}

        def update() -> None:
            engine.update_weights(constants(engine))
            engine.generate(asked, params)
            assert engine.finish_update() == 1

        assert peak_of(update) <= quiet
        assert {name: value.data_ptr() for name, value in executor_of(engine).weights.values()} == addresses
        assert all(
            torch.equal(value[0], NEW.cuda().expand_as(value[0])) for _, value in executor_of(engine).weights.values()
        )
