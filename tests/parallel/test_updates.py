"""Weight updates of divided engines: every rank installs its part, or none does."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.executors.protocol import Executor, Staged
from nano_inference.types import WeightError
from tests.models.families import make_model
from tests.parallel.ranks import open_ranks
from tests.parallel.test_engine import assert_same, config_of

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
PROMPTS = [[1, 2, 3], [9] * 20]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("updates")
    make_model("llama-linear-rope-biases", directory)
    return directory


def weights_of(path: Path, scale: float) -> dict[str, torch.Tensor]:
    return {name: value * scale for name, value in load_file(path / "model.safetensors").items()}


def config(path: Path, size: int = 1) -> EngineConfig:
    return config_of(path, tensor_parallel=size)


def directory_of(weights: dict[str, torch.Tensor], path: Path, num_shards: int) -> Path:
    """Write weights as a directory of shards."""
    path.mkdir()
    (path / "STABLE").touch()
    names = list(weights)
    shards = {f"model-{index}.safetensors": names[index::num_shards] for index in range(num_shards)}
    for file, own in shards.items():
        save_file({name: weights[name] for name in own}, path / file)
    entries = ", ".join(f'"{name}": "{file}"' for file, own in shards.items() for name in own)
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{entries}}}}}')
    return path


@pytest.mark.parametrize(("source", "size"), [("tensors", 4), ("pairs", 2), ("bfloat16", 2), ("shards", 2)])
def test_an_update_is_that_of_an_undivided_engine(source: str, size: int, tiny: Path, tmp_path: Path) -> None:
    weights: Any = weights_of(tiny, 1.25)
    if source == "bfloat16":
        weights = {name: value.bfloat16() for name, value in weights.items()}
    elif source == "shards":
        weights = directory_of(weights, tmp_path / "new", 3)
    with InferenceEngine(config(tiny)) as whole:
        whole.update_weights(weights, blocking=True)
        right, checksum = whole.generate(PROMPTS, PARAMS), whole.weights_checksum()
    with open_ranks(config(tiny, size)) as engine:
        given = iter(weights.items()) if source == "pairs" else weights
        assert engine.update_weights(given, blocking=True, version="step-1", checksum=checksum) == 1
        assert_same(engine.generate(PROMPTS, PARAMS), right)
        assert engine.weights_checksum() == checksum


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broken_part_leaves_every_rank_on_the_old_weights(rank: int, tiny: Path) -> None:
    with open_ranks(config(tiny, 2)) as engine:
        right, checksum = engine.generate(PROMPTS, PARAMS), engine.weights_checksum()
        weights = weights_of(tiny, 1.25)
        name = "model.layers.1.mlp.gate_proj.weight"
        weights[name][-1 if rank else 0, 0] = torch.nan
        with pytest.raises(WeightError, match=rf"{name}: holds NaN or infinity"):
            engine.update_weights(weights, blocking=True)
        assert engine.weights_checksum() == checksum
        assert engine.get_weight_version() == 0
        assert_same(engine.generate(PROMPTS, PARAMS), right)
        engine.update_weights(weights_of(tiny, 1.25), blocking=True)
        assert engine.weights_checksum() != checksum


def test_a_refused_update_is_freed_on_the_other_ranks(tiny: Path) -> None:
    is_freed = threading.Event()
    weights = weights_of(tiny, 1.25)
    del weights["model.layers.1.mlp.down_proj.weight"]

    def changed(own: Executor) -> Executor:
        stage = own.weights.stage

        def watched(**options: Any) -> Staged:
            staged = stage(**options)
            weakref.finalize(staged, is_freed.set)
            return staged

        own.weights.stage = watched  # type: ignore[method-assign]
        return own

    with open_ranks(config(tiny, 2), changed=changed) as engine:
        with pytest.raises(WeightError):
            engine.update_weights(weights, blocking=True)
        assert is_freed.wait(60)


@pytest.mark.parametrize("fault", ["missing", "checksum"])
def test_a_refused_update_leaves_the_ranks_in_step(fault: str, tiny: Path) -> None:
    weights = weights_of(tiny, 1.25)
    name = "model.layers.0.self_attn.q_proj.weight"
    if fault == "missing":
        del weights[name]
    with open_ranks(config(tiny, 2)) as engine:
        checksum = engine.weights_checksum()
        with pytest.raises(WeightError):
            engine.update_weights(weights, blocking=True, checksum="0" * 64 if fault == "checksum" else None)
        assert engine.weights_checksum() == checksum
        engine.update_weights(weights_of(tiny, 1.25), blocking=True)
        assert engine.weights_checksum() != checksum


def test_an_update_is_gathered_beside_steps_and_installed_between_them(tiny: Path) -> None:
    """The updated sample's log-probabilities are those of the version that each token names."""
    params = SamplingParams(max_tokens=50, seed=3, ignore_eos=True)
    new = weights_of(tiny, 1.25)
    with open_ranks(config(tiny, 2)) as engine:
        request = engine.add_request(PROMPTS[1], params, claim=True)
        for _ in range(5):
            engine.tick()
        may_end = threading.Event()

        def slowly() -> Any:
            for index, item in enumerate(new.items()):
                if index == len(new) // 2:
                    may_end.wait()
                yield item

        engine.update_weights(slowly(), on_running="keep")
        for _ in range(8):
            engine.tick()
        assert engine.get_weight_version() == 0
        may_end.set()
        engine.wait_for_any([request])
        engine.finish_update()
        (sample,) = engine.collect(request)
    versions = sample.token_versions
    assert set(versions) == {0, 1} and list(versions) == sorted(versions)
    with InferenceEngine(config(tiny)) as whole:
        text = [*sample.prompt_tokens, *sample.completion_tokens]
        count = list(versions).count(0)
        assert whole.score(text, len(PROMPTS[1]))[:count] == pytest.approx(sample.logprobs[:count], abs=2e-5)


def test_a_cancelled_update_is_not_installed(tiny: Path) -> None:
    with open_ranks(config(tiny, 2)) as engine:
        checksum = engine.weights_checksum()
        engine.update_weights(weights_of(tiny, 1.25))
        engine.cancel_update()
        engine.generate(PROMPTS, PARAMS)
        assert engine.weights_checksum() == checksum
        engine.update_weights(weights_of(tiny, 0.5), blocking=True)
        assert engine.weights_checksum() != checksum


def test_discarded_weights_are_replaced_on_all_ranks(tiny: Path) -> None:
    with open_ranks(config(tiny, 2)) as engine:
        right = engine.generate(PROMPTS, PARAMS)
        engine.sleep(discard_weights=True)
        engine.wake()
        engine.update_weights(weights_of(tiny, 1.0), blocking=True)
        assert_same(engine.generate(PROMPTS, PARAMS), right)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_weight_that_differs_on_any_rank_is_refused(rank: int, tmp_path: Path) -> None:
    make_model("llama3-rope-ratio3-tied", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    with open_ranks(config(tmp_path, 2)) as engine:
        engine.update_weights({**weights, "lm_head.weight": head}, blocking=True)
        head[-1 if rank else 0, 0] += 1
        with pytest.raises(WeightError, match=r"differs from model\.embed_tokens\.weight, to which this model ties it"):
            engine.update_weights({**weights, "lm_head.weight": head}, blocking=True)
