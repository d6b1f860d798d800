"""The gradient at the logits: onehot - softmax of the engine's own, where it rounds, and where sampling truncates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.executors.logprobs import normalise
from nano_inference.rl.exact import Policy, backward, train_logprobs
from nano_inference.rl.exact.logits import logits_of
from tests.cuda.engines import open_cuda
from tests.cuda.models import config_of, wide_heads
from tests.models.families import FAMILIES, make_model
from tests.nanochat.tiny import write_checkpoint
from tests.rl.exact_checks import PARAMS, PROMPTS, check_bits, check_gradient, check_head, sampled, texts_of

FAMILY = "llama-ratio1-untied"


def opened(path: Path, **options: Any) -> InferenceEngine:
    return InferenceEngine(EngineConfig(str(path), device="cpu", num_threads=1, kv_cache_bytes=8 << 20, **options))


@pytest.mark.parametrize("kind", ["qwen3-ratio3-tied", "gemma2", "G4", "G2, full decode"])
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}], ids=str
)
def test_logits_are_those_that_were_sampled_from(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    if kind in FAMILIES:
        make_model(kind, tmp_path)
    else:
        write_checkpoint(tmp_path, kind[:2])
    if kind.endswith("full decode"):
        options = options | {"overrides": ("decode_window=full", "short_window=24")}
    with opened(tmp_path, max_tokens_per_batch=16, **options) as engine:
        samples = engine.generate(PROMPTS, PARAMS, 2)
        texts, starts = texts_of(samples)
        ids = [token for text, start in zip(texts, starts, strict=True) for token in text[start:]]
        found = []
        for width in (7, 4096):
            take = logits_of(engine, texts, starts, width)
            logits_NV = torch.cat([take(13), take(len(ids) - 13)])
            own_N1 = logits_NV.gather(-1, torch.tensor(ids)[:, None])
            found.append(normalise(logits_NV, [0.8] * len(ids)).logprobs(own_N1)[:, 0])
    assert torch.equal(*found)
    assert (found[0] - sampled(samples)).abs().max() <= 1e-6  # the kernels' own exp and log round otherwise


OPENERS: dict[str, Callable[[Path], InferenceEngine]] = {
    "bfloat16": lambda path: opened(path, dtype="bfloat16"),
    "int8": lambda path: opened(path, dtype="int8"),
    "code of CUDA": lambda path: open_cuda(path, config_of(path, deterministic=True), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", OPENERS)
def test_gradient_of_the_head_has_the_engines_probabilities(kind: str, tmp_path: Path) -> None:
    model = make_model(FAMILY, tmp_path, wide_heads(FAMILY))
    with OPENERS[kind](tmp_path) as engine:
        check_head(engine, model)


@pytest.mark.slow
def test_code_of_cuda_is_exact_in_float32(tmp_path: Path) -> None:
    model = make_model(FAMILY, tmp_path, wide_heads(FAMILY))
    with open_cuda(tmp_path, config_of(tmp_path, deterministic=True)) as engine:
        check_gradient(engine, model, 1e-5)
        check_bits(engine, model)


def test_tokens_that_sampling_kept_have_a_gradient(tmp_path: Path) -> None:
    """Recomputed logits are off by 1e-6: where the last kept token and the next are nearer, it would be excluded."""
    model = make_model(FAMILY, tmp_path)
    with torch.no_grad():  # pairs of equal rows, but for one unit in the last place
        model.lm_head.weight[1::2] = model.lm_head.weight[::2] * (1 + 2e-7)
    params = replace(PARAMS, max_tokens=60, top_k=3, temperature=1.0)
    with opened(tmp_path, dtype="float32") as engine:
        policy = Policy(engine, model)
        policy.sync()
        samples = engine.generate(PROMPTS, params, 6)
        values = train_logprobs(policy, samples, params=params)
        assert torch.equal(values.detach(), sampled(samples))
        seen: list[Tensor] = []
        logprobs_of = backward.logprobs_of

        def watched(*arguments: Any) -> Tensor:
            seen.append(logprobs_of(*arguments))
            return seen[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward, "logprobs_of", watched)
            values.sum().backward()
    assert torch.cat(seen).isfinite().all()
