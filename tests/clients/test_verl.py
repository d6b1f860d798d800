"""verl's own classes with `rollout.name=nano_inference`, on a local Ray cluster; in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from tests.clients.process import NEEDED, succeed

PYTHON = Path(sys.prefix) / "verl" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip(f"verl: {NEEDED}", allow_module_level=True)

PROMPT = [72, 101, 108, 108, 111]


def model_with_noise(source: Path, target: Path) -> Path:
    """Save a model with other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
    model.save_pretrained(target)
    return target


def greedy(model: Path) -> TrainingSample:
    with InferenceEngine(EngineConfig(str(model), device="cpu", dtype="float32", kv_cache_bytes=32 << 20)) as engine:
        return engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint that is served, and the weights of an update."""
    from tests.server.tiny import make_tiny  # imports Transformers

    directory = make_tiny(tmp_path_factory.mktemp("verl"), 2048)
    return directory, model_with_noise(directory, tmp_path_factory.mktemp("verl_update"))


@pytest.fixture(scope="module")
def found(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What verl's classes returned."""
    script = Path(__file__).with_name("verl_calls.py")
    printed = succeed([str(PYTHON), str(script), *map(str, models)], tmp_path_factory.mktemp("verl_runs"))
    results: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
    return results


def assert_is(output: dict[str, Any], wanted: TrainingSample) -> None:
    assert output["token_ids"] == list(wanted.completion_tokens)
    assert output["log_probs"] == pytest.approx(wanted.logprobs, abs=1e-5)
    assert output["stop_reason"] == "completed" and output["num_preempted"] == 0


def test_verl_finds_the_backend_by_its_entry_point(found: dict[str, Any]) -> None:
    assert found["is_replica"] and found["missing"] == [] and found["rank"] == [0, True]


def test_a_standalone_server_generates_what_the_engine_does(found: dict[str, Any], models: tuple[Path, Path]) -> None:
    assert_is(found["before"], greedy(models[0]))
    assert found["before"]["extra_fields"]["global_steps"] is None
    assert found["chat"]["completion_tokens"] <= 3


def test_an_aborted_request_is_continued_by_verls_client(found: dict[str, Any]) -> None:
    assert len(found["whole"]["token_ids"]) == 1500
    assert found["resumed"]["token_ids"] == found["whole"]["token_ids"]
    assert found["resumed"]["log_probs"] == pytest.approx(found["whole"]["log_probs"], abs=1e-4)


def test_weights_of_a_checkpoint_engine_are_installed(found: dict[str, Any], models: tuple[Path, Path]) -> None:
    assert_is(found["after"], greedy(models[1]))
    steps = [found["after"]["extra_fields"][name] for name in ("global_steps", "min_global_steps", "max_global_steps")]
    assert steps == [7, 7, 7]
    assert "the update lacks 20 tensors" in found["refused"]
    assert found["kept"]["token_ids"] == found["after"]["token_ids"]
    assert found["kept"]["extra_fields"]["global_steps"] == 7


def test_a_hybrid_server_wakes_with_the_trainers_weights(found: dict[str, Any], models: tuple[Path, Path]) -> None:
    assert found["mode"] == "hybrid"
    assert_is(found["awake"], greedy(models[1]))
    assert found["awake"]["extra_fields"]["global_steps"] == 3
