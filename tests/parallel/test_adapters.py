"""Adapters of divided engines: every rank has its part, and rows get what an undivided engine computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.executors.protocol import Executor
from tests.models.adapted import adapted, save
from tests.models.families import make_model
from tests.models.hybrids import HYBRIDS, make_hybrid
from tests.parallel.ranks import open_ranks
from tests.parallel.test_engine import assert_same, config_of

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, prompt_logprobs=2)
PROMPTS = [[1, 2, 3], [9] * 20]
HEAD = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapters_of(name: str, directory: Path, targets: Any) -> list[Path]:
    """Write a model and two adapters of it."""
    model = (make_hybrid if name in HYBRIDS else make_model)(name, directory)
    found = []
    for seed, rank in ((1, 4), (2, 17)):
        made = adapted(model, seed, r=rank, target_modules=targets)
        found.append(save(made, directory / f"adapter-{seed}"))
        model = made.unload()
    return found


def samples_of(engine: InferenceEngine, adapters: list[Path]) -> list[TrainingSample]:
    for number, path in enumerate(adapters):
        engine.load_adapter(f"a{number}", path)
    names = [None, *(f"a{number}" for number in range(len(adapters)))]
    found = [engine.generate(PROMPTS, PARAMS, adapter=name) for name in names]
    engine.load_adapter("a0", adapters[1])
    engine.unload_adapter("a1")
    return [one for samples in [*found, engine.generate(PROMPTS, PARAMS, adapter="a0")] for one in samples]


@pytest.mark.parametrize(
    ("name", "size", "targets"),
    [("llama-linear-rope-biases", 2, HEAD), ("qwen3-ratio3-tied", 2, HEAD), ("plain", 2, "all-linear")],
)
def test_rows_have_the_adapter_of_an_undivided_engine(name: str, size: int, targets: Any, tmp_path: Path) -> None:
    adapters = adapters_of(name, tmp_path, targets)
    with InferenceEngine(config_of(tmp_path)) as plain, open_ranks(config_of(tmp_path, tensor_parallel=size)) as ours:
        right = samples_of(plain, adapters)
        assert_same(samples_of(ours, adapters), right)
    assert len({one.completion_tokens for one in right}) == 6 and right[4].logprobs == right[6].logprobs


def test_an_adapter_that_one_rank_refuses_is_on_none(tmp_path: Path) -> None:
    adapters = adapters_of("llama-ratio1-untied", tmp_path, "all-linear")
    config: EngineConfig = config_of(tmp_path, tensor_parallel=2)

    def full(own: Executor) -> Executor:
        def fail(adapter: object) -> Any:
            raise MemoryError("no space")

        own.stage_adapter = fail  # type: ignore[method-assign]
        return own

    with open_ranks(config, changed=full) as engine:
        before = engine.generate(PROMPTS, PARAMS)
        with pytest.raises(RuntimeError, match="rank 1: MemoryError: no space"):
            engine.load_adapter("a", adapters[0])
        assert not engine.adapters()
        assert_same(engine.generate(PROMPTS, PARAMS), before)
