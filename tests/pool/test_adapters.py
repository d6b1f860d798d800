"""Adapters of a pool: in all workers or in none, and in those that replace dead ones."""

from __future__ import annotations

import pytest

from nano_inference import BadRequest, InferenceEngine, RolloutPool, SamplingParams
from nano_inference.rl.pool.local import LocalFleet
from nano_inference.types import StepResult, UpdateBusy
from nano_inference.weights.adapters import StagedAdapter
from nano_inference.weights.updates import AdapterLoad
from tests.sim.fakes import Adapting, adapting_engine, fake_config, fake_parts

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
PROMPTS = [[5, 9, 30, n] for n in range(8)]


class Worker(Adapting):
    """A worker's engine that refuses some adapters."""

    refuses = ""

    def stage_adapter(self, load: AdapterLoad) -> StagedAdapter:
        if load.name == self.refuses:
            raise BadRequest("adapter", "has NaN")
        return super().stage_adapter(load)


def test_pool_loads_adapters_into_all_workers_or_none() -> None:
    engines: dict[int, list[Worker]] = {0: [], 1: []}

    def open_engine(index: int) -> InferenceEngine:
        engine = Worker(fake_config(max_adapters=2), parts=fake_parts("radix", 100, 4))
        engines[index].append(engine)
        return engine

    with RolloutPool(LocalFleet(open_engine, 2), seed=1) as pool:
        assert pool.load_adapter("a", "directory") == 1
        engines[1][0].refuses = "b"
        with pytest.raises(BadRequest, match="adapter: has NaN"):
            pool.load_adapter("b", "directory")
        assert [[info.name for info in one[0].adapters()] for one in engines.values()] == [["a"], ["a"]]
        with pytest.raises(BadRequest, match="adapter: the pool has not loaded 'b', or it was evicted; loaded: a"):
            pool.generate(PROMPTS, PARAMS, adapter="b")
        assert pool.load_adapter("a", "directory", version="new") == "new"
        expected = alone(PROMPTS, 2)
        samples = pool.generate(PROMPTS, PARAMS, adapter="a")
        assert [one.completion_tokens for one in samples] == expected
        assert {one.adapter_versions for one in samples} == {("new",) * 6}
        engines[0][0].parts.runner.on_step = dies
        assert {one.adapter_versions for one in pool.generate(PROMPTS, PARAMS, adapter="a")} == {("new",) * 6}
        assert pool.num_replaced == 1 and [info.version for info in engines[0][1].adapters()] == ["new"]
        for name in ("c", "d"):
            pool.load_adapter(name, "directory")
        with pytest.raises(BadRequest, match="has not loaded 'a', or it was evicted; loaded: c, d"):
            pool.generate(PROMPTS, PARAMS, adapter="a")
        assert pool.load_adapter("a", "directory") and pool.unload_adapter("d")
        assert pool.unload_adapter("a") and not pool.unload_adapter("a")
        assert not any(one[-1].adapters() for one in engines.values())


def dies(number: int) -> None:
    raise RuntimeError("killed by the test")


def alone(prompts: list[list[int]], num_loads: int) -> list[tuple[int, ...]]:
    """Return what one engine computes after as many loads."""
    engine = adapting_engine()
    for _ in range(num_loads):
        engine.load_adapter("a", "directory")
    return [one.completion_tokens for one in engine.generate(prompts, PARAMS, adapter="a")]


def test_adapter_without_room_in_one_worker_is_loaded_into_none() -> None:
    engines: list[Adapting] = []

    class Pausing(Adapting):
        """Stops after its first step with a token, so that requests stay open."""

        def tick(self) -> StepResult:
            result = super().tick()
            if result.stats.num_sampled:
                self.pause()
            return result

    def open_engine(index: int) -> InferenceEngine:
        engines.append(Pausing(fake_config(max_adapters=1), parts=fake_parts("radix", 100, 4)))
        return engines[-1]

    with RolloutPool(LocalFleet(open_engine, 2), seed=1) as pool:
        pool.load_adapter("a", "directory")
        stream = pool.stream(PROMPTS[0], PARAMS, adapter="a")
        next(stream)
        with pytest.raises(UpdateBusy, match="'b' does not fit"):
            pool.load_adapter("b", "directory")
        stream.close()
        assert [[info.name for info in one.adapters()] for one in engines] == [["a"], ["a"]]
        assert pool.num_replaced == 0
