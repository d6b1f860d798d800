"""The torch executor on CUDA; skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="NO TRANSFORMERS: pip install -e '.[dev]'")

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.models.families import FAMILIES, gap, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device"),
]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_cuda_float32_matches_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    config = EngineConfig(model_path=str(tmp_path), device="cuda", dtype="float32", kv_cache_bytes=64 << 20)
    with InferenceEngine(config) as engine:
        sample = engine.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))[0]
    assert gap(model, [*sample.prompt_tokens, *sample.completion_tokens], list(sample.logprobs)) <= 1e-4


def test_cuda_default_dtype_gives_finite_logprobs(tmp_path: Path) -> None:
    make_model("llama-ratio1-untied", tmp_path)
    with InferenceEngine(EngineConfig(model_path=str(tmp_path), device="cuda", kv_cache_bytes=64 << 20)) as engine:
        samples = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=16, seed=1, ignore_eos=True), 4)
    assert all(len(sample.completion_tokens) == 16 for sample in samples)
