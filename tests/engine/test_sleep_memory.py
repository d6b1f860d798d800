"""Memory over sleep and wake, second engines, dropped engines and updates: a KV cache is freed, and nothing grows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, WeightError
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.store import KernelStore
from nano_inference.executors.torch.executor import TorchExecutor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the system does not list memory"),
]

CACHE = 72 << 20
"""Large beside anything else that comes and goes."""
CYCLES = 8
SLACK = CACHE // 4
"""Unrelated growth that is accepted; one leaked cache is four times as much, one leaked half twice."""
Kernels = Literal["auto", "off"]


def resident() -> int:
    """Bytes of this process that are in memory.

    The address space says nothing: whenever a thread starts before the last one has quite ended, malloc reserves 64 MiB
    more of it for a heap that may stay empty.
    """
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make(kernels: Kernels) -> InferenceEngine:
    options = {"kv_cache_bytes": CACHE, "max_model_len": 256, "max_batch_size": 128, "num_threads": 1}
    return InferenceEngine(EngineConfig(model_path="calculator", device="cpu", kernels=kernels, **options))


def use(engine: InferenceEngine) -> None:
    """Compute something, and touch every page of the cache."""
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert isinstance(engine.parts.executor, CpuExecutor | TorchExecutor)
    store = engine.parts.executor.store
    assert store.num_bytes > CACHE * 0.9, "the engine made a smaller cache than it was given"
    if isinstance(store, KernelStore):
        assert store.wait_for_pages(60)
        store.cache.k.fill_(1)
        store.cache.v.fill_(1)
    else:
        store.k_LSKD.fill_(1)
        store.v_LSKD.fill_(1)


@pytest.fixture(params=["auto", "off"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found: Kernels = request.param
    return found


@pytest.fixture
def engine(kernels: Kernels) -> Iterator[InferenceEngine]:
    with make(kernels) as made:
        use(made)
        yield made


def is_flat(cycle: Callable[[], object]) -> bool:
    """Whether memory stays the same over some cycles after two that warm up.

    A cycle must not end with a cache that was just taken: a thread brings in its pages.
    """
    cycle()
    cycle()
    gc.collect()
    before = resident()
    for _ in range(CYCLES):
        cycle()
    gc.collect()
    return resident() - before < SLACK


def test_sleep_frees_the_cache_and_cycles_do_not_grow(engine: InferenceEngine) -> None:
    freed = []

    def cycle() -> None:
        engine.wake()
        use(engine)
        awake = resident()
        engine.sleep()
        freed.append(awake - resident())

    assert is_flat(cycle)
    assert min(freed[2:]) > CACHE * 0.9


def test_a_second_engine_frees_its_cache_asleep_and_shut_down(engine: InferenceEngine) -> None:
    freed = []

    def cycle() -> None:
        with engine.copy(kv_cache_bytes=CACHE) as copy:
            use(copy)
            awake = resident()
            copy.sleep()
            freed.append(awake - resident())
            copy.wake()
            use(copy)

    assert is_flat(cycle)
    assert min(freed[2:]) > CACHE * 0.9


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_a_dropped_engine_frees_its_cache(kernels: Kernels, is_shut_down: bool) -> None:
    def cycle() -> None:
        engine = make(kernels)
        use(engine)
        if is_shut_down:
            before = resident()
            engine.shutdown()
            assert before - resident() > CACHE * 0.9, "an engine that was shut down keeps its cache"

    assert is_flat(cycle)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_failed_update_frees_all_tensors_without_a_collection(
    engine: InferenceEngine, blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "nano_inference.engine")  # a captured record refers to the error and its frames
    assert isinstance(engine.parts.executor, CpuExecutor | TorchExecutor)
    wrong = {name: value.clone() for name, value in engine.parts.executor.weights.values()}
    wrong["no.such.weight"] = torch.zeros(3)
    freed = [weakref.ref(value) for value in wrong.values()]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(WeightError, match=r"no\.such\.weight"):
            engine.update_weights(wrong, blocking=blocking)
            engine.finish_update()
        del wrong
        assert not any(one() is not None for one in freed)
    finally:
        gc.enable()
