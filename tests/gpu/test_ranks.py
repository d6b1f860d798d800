"""Engines that are divided among several GPUs, through NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="NO TRANSFORMERS: pip install transformers")

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.models.families import make_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PARAMS = SamplingParams(max_tokens=32, seed=3, ignore_eos=True)


@pytest.mark.parametrize("name", ["llama-ratio1-untied", "gemma2"])
def test_two_devices_compute_what_one_does(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    common = {"model_path": str(tmp_path), "device": "cuda", "dtype": "float32", "kv_cache_bytes": 16 << 20}
    with InferenceEngine(EngineConfig.from_dict({**common, "kernels": "off"})) as whole:
        right = whole.generate([[1, 2, 3], [4] * 40], PARAMS, 2)
    with InferenceEngine(EngineConfig.from_dict({**common, "tensor_parallel": 2})) as engine:
        mine = engine.generate([[1, 2, 3], [4] * 40], PARAMS, 2)
    assert [one.completion_tokens for one in mine] == [one.completion_tokens for one in right]
    for one, other in zip(mine, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
