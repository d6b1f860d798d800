"""`allow_long_context`: sequences longer than the model was trained for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.server.tiny import make_tiny

LENGTH = 160


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("short"), positions=64)


def engine_of(directory: Path, **fields: object) -> InferenceEngine:
    options = {"device": "cpu", "kv_cache_bytes": 1 << 20, "max_model_len": LENGTH, **fields}
    return InferenceEngine(EngineConfig.from_dict({"model_path": str(directory), **options}))


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_long_sequence_equals_transformers(directory: Path, kernels: str, caplog: pytest.LogCaptureFixture) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = [1, 2, 3, 4]
    with caplog.at_level(logging.WARNING), engine_of(directory, kernels=kernels, allow_long_context=True) as engine:
        params = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
        (sample,) = engine.generate([prompt], params)
    assert len(sample.completion_tokens) == LENGTH - len(prompt)
    ids = torch.tensor([[*prompt, *sample.completion_tokens]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = scores[torch.arange(len(scores)), ids[0, len(prompt) :]]
    assert torch.allclose(torch.tensor(sample.logprobs), wanted, atol=1e-4)
    assert torch.equal(scores.argmax(-1), ids[0, len(prompt) :])
    assert "max_model_len 160 is more than the model was trained for, 64 tokens" in caplog.text


def test_length_is_that_of_the_model_otherwise(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(directory) as engine:
        assert engine.parts.max_model_len == 64
    with engine_of(directory, allow_long_context=True, max_model_len=32) as engine:
        assert engine.parts.max_model_len == 32
    assert "trained" not in caplog.text
