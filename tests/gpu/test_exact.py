"""Exact log-probabilities in a trainer on CUDA: equal bits under `deterministic`, gradients; skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="NO TRANSFORMERS: pip install transformers")

from nano_inference import BadRequest, EngineConfig, InferenceEngine
from nano_inference.config import Dtype
from nano_inference.rl.exact import Policy
from tests.cuda.models import wide_heads
from tests.models.families import make_model
from tests.rl.exact_checks import check_bits, check_gradient, check_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device"),
]
FAMILIES = ("llama-ratio1-untied", "llama3-rope-ratio3-tied", "qwen3-ratio3-tied", "gemma2")


def opened(path: Path, dtype: Dtype, *, deterministic: bool = True) -> InferenceEngine:
    config = EngineConfig(
        str(path), device="cuda", dtype=dtype, deterministic=deterministic, kv_cache_bytes=64 << 20, max_batch_size=32,
        max_model_len=1024,
    )  # fmt: skip
    return InferenceEngine(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_scored_and_trained_values_are_equal(name: str, dtype: Dtype, tmp_path: Path) -> None:
    model = make_model(name, tmp_path, wide_heads(name)).cuda()
    with opened(tmp_path, dtype) as engine:
        check_bits(engine, model)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_float32_are_those_of_transformers_in_float64(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path, wide_heads(name)).cuda()
    with opened(tmp_path, "float32") as engine:
        check_gradient(engine, model, 1e-5)


def test_gradient_of_the_head_in_bfloat16_has_the_engines_probabilities(tmp_path: Path) -> None:
    model = make_model(FAMILIES[0], tmp_path, wide_heads(FAMILIES[0])).cuda()
    with opened(tmp_path, "bfloat16") as engine:
        check_head(engine, model)


def test_engine_that_is_not_deterministic_is_refused(tmp_path: Path) -> None:
    model = make_model(FAMILIES[0], tmp_path, wide_heads(FAMILIES[0])).cuda()
    with opened(tmp_path, "float32", deterministic=False) as engine, pytest.raises(BadRequest) as caught:
        Policy(engine, model)
    assert caught.value.field == "deterministic"
