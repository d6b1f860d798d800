"""Steps leave Python's garbage collector nothing to search: no cycles, and no objects for the tokens of a sample."""

from __future__ import annotations

import gc

import pytest

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.config import CacheType
from nano_inference.types import StepResult
from tests.sim.fakes import fake_engine

NUM_ROWS, LOOKAHEAD = 8, 4
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


class Counts:
    """Counts the objects that the collector would search after each step."""

    def __init__(self) -> None:
        self.num_searched: list[int] = []
        self.num_in_cycles = 0

    def __call__(self, result: StepResult) -> None:
        self.num_in_cycles += gc.collect()
        self.num_searched.append(len(gc.get_objects()))

    @property
    def growth(self) -> int:
        """Objects that the steps between the tenth and the eightieth left behind."""
        return self.num_searched[80] - self.num_searched[10]


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_a_decode_step_leaves_no_objects_to_search(cache_type: CacheType) -> None:
    """Requests that only return samples, as those of `generate`."""
    counts = Counts()
    with fake_engine(cache_type, 2000, LOOKAHEAD) as engine:
        gc.collect()
        engine.generate([[1, 2, 3]] * NUM_ROWS, PARAMS, progress=counts)
    assert counts.growth < NUM_ROWS and counts.num_in_cycles < NUM_ROWS


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_a_step_leaves_no_objects_to_search_when_deltas_are_taken(cache_type: CacheType) -> None:
    """Requests whose deltas are read after each step."""
    counts = Counts()
    with fake_engine(cache_type, 2000, LOOKAHEAD) as engine:
        ids = [engine.add_request([1, 2, 3], PARAMS, claim=True) for _ in range(NUM_ROWS)]
        gc.collect()
        for _ in range(90):
            counts(engine.tick())
            engine.take_deltas(ids)
    assert counts.growth < NUM_ROWS and counts.num_in_cycles < NUM_ROWS


def test_streams_that_were_dropped_leave_no_objects() -> None:
    def drop_one() -> int:
        next(engine.stream([1, 2, 3], PARAMS))
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        engine.flush_cache()
        gc.collect()
        return len(gc.get_objects())

    with fake_engine("radix", 2000, LOOKAHEAD) as engine:
        num_objects = [drop_one() for _ in range(30)]
    assert num_objects[-1] - num_objects[10] < 5


def test_a_request_of_a_call_keeps_samples_and_no_deltas() -> None:
    """`collect` returns its samples; without `claim` it has no deltas to read."""

    def work(engine: InferenceEngine) -> None:
        request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, seed=1), 2, for_call=True)
        engine.wait_for_any([request_id])
        assert engine.take_deltas([request_id]) == []
        with pytest.raises(ValueError, match=f"{request_id} was not added with claim"):
            engine.deltas(request_id)
        assert [sample.sample_index for sample in engine.collect(request_id)] == [0, 1]

    with fake_engine("radix", 2000, LOOKAHEAD) as engine:
        engine.exclusively(lambda: work(engine))
