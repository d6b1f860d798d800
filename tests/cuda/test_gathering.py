"""Updates of the CUDA executor while requests run: gathering and steps do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.cuda_parts.models import executor_of
from nano_inference import InferenceEngine, SamplingParams
from tests.cuda.engines import open_cuda
from tests.cuda.models import config_of, write_model

PARAMS = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
WAIT_S = 60


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[InferenceEngine]:
    write_model("qwen2-ratio7", tmp_path)
    with open_cuda(tmp_path, config_of(tmp_path)) as engine:
        engine.add_request([1, 2, 3], PARAMS)
        while engine.tick().stats.num_sampled < 16:
            pass
        yield engine


class Source:
    """The engine's weights, all but the first after an event."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.named = [(name, value.clone()) for name, value in executor_of(engine).weights.values()]
        self.may_continue, self.is_closed = threading.Event(), threading.Event()
        self.num_taken = 0

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for one in self.named:
                self.num_taken += 1
                yield one
                assert self.may_continue.wait(WAIT_S)
        finally:
            self.is_closed.set()


def test_windows_are_whole_while_new_weights_are_gathered(engine: InferenceEngine) -> None:
    source = Source(engine)
    engine.update_weights(source.pairs())
    assert [engine.tick().stats.num_sampled for _ in range(2)] == [16, 16]
    assert engine.weight_info().update == "staging"
    source.may_continue.set()
    assert engine.finish_update() == 1
    assert engine.tick().stats.weight_version == 1
