"""Loading a model for serving: names, limits, defaults, step size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.load import CPU_STEP_TOKENS, for_serving
from nano_inference.types import ModelError
from tests.server.tiny import NAME, opened


@pytest.mark.parametrize(("asked", "tokens"), [(None, CPU_STEP_TOKENS), (2048, 2048), (64, 64)])
def test_steps_are_short_on_a_cpu_unless_asked_otherwise(asked: int | None, tokens: int) -> None:
    assert for_serving(EngineConfig(model_path="m", device="cpu"), asked).max_tokens_per_batch == tokens
    asked_config = ServerConfig(max_tokens_per_batch=asked)
    assert ServerConfig.from_dict(asked_config.to_dict()) == asked_config


def test_names_limits_and_defaults_come_from_the_files(tiny_directory: Path, tmp_path: Path) -> None:
    one = opened(tiny_directory, ServerConfig())
    assert one.model.names == (NAME,)
    assert (one.model.limits.max_model_len, one.model.limits.vocab_size) == (512, 260)
    assert one.model.dialogue is not None
    other = shutil.copytree(tiny_directory, tmp_path / "warm")
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "do_sample": True}))
    two = opened(other, ServerConfig(served_model_name=("a", "b")), max_model_len=64)
    assert (two.model.names, two.model.limits.max_model_len) == (("a", "b"), 64)
    assert (two.model.generation["temperature"], two.model.generation["top_k"]) == (0.25, 7)
    for loaded in (one, two):
        loaded.engine.shutdown()


def test_cache_config_info_labels(tiny_directory: Path) -> None:
    one = opened(tiny_directory, ServerConfig())
    line = next(line for line in one.metrics.render().decode().splitlines() if "cache_config_info{" in line)
    kv = one.model.limits
    assert f'kv_cache_size_tokens="{kv.num_blocks * kv.block_size}"' in line
    assert "kv_cache_max_concurrency=" in line
    one.engine.shutdown()


def test_invalid_generation_config_raises_model_error(tiny_directory: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_directory, tmp_path / "broken")
    (broken / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ModelError, match=r"generation_config.json: temperature must be in"):
        opened(broken, ServerConfig())
