"""A random model with Gemma 3's vocabulary, compared with Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams
from tests.models.families import make_model, reference_logprobs

pytestmark = pytest.mark.slow

GEMMA = {"vocab_size": 262_144, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
PROMPTS = [[7 * i + 1, 250_000 - i, 99 * i] for i in range(3)]
Witness = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Witness:
    directory = tmp_path_factory.mktemp("large_vocabulary")
    model = make_model("gemma3", directory, GEMMA)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # tied to the head: logits as spread out as a trained model's
    model.save_pretrained(directory)
    return directory, model


def exact(model: transformers.PreTrainedModel, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    """Return Transformers' log-probabilities: forward in float32, normalised in float64."""
    table = torch.log_softmax(reference_logprobs(model, [*prompt, *completion]).double() / temperature, -1)
    return table[len(prompt) - 1 :].gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_logprobs_match_transformers(witness: Witness, kernels: str, temperature: float) -> None:
    directory, model = witness
    config = EngineConfig(model_path=str(directory), device="cpu", kernels=kernels, kv_cache_bytes=1 << 20)
    plain = SamplingParams(max_tokens=16, ignore_eos=True, seed=3, temperature=temperature)
    special = SamplingParams(max_tokens=16, ignore_eos=True, seed=3, temperature=temperature, logprobs=2)
    differences: list[float] = []
    with InferenceEngine(config) as engine:
        for params in (plain, special):
            for prompt, sample in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
                drawn = torch.tensor(sample.logprobs, dtype=torch.float64)
                ids = [*prompt, *sample.completion_tokens]
                scores = torch.tensor(engine.score(ids, len(prompt), temperature=temperature), dtype=torch.float64)
                expected = exact(model, prompt, list(sample.completion_tokens), temperature)
                assert float((drawn - expected).abs().max()) <= 1e-4
                assert float((scores - expected).abs().max()) <= 1e-4
                differences += (scores - drawn).tolist()
    if kernels == "auto":  # logits have the same bits in any batch
        assert max(map(abs, differences)) <= 1e-6
    else:  # the forward pass differs between prefill and decode
        assert max(map(abs, differences)) <= 1e-5
        assert 0.3 < sum(gap > 0 for gap in differences) / sum(gap != 0 for gap in differences) < 0.7
