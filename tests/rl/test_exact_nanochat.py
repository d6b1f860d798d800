"""Exact log-probabilities of nanochat: equal bits, and gradients against its formulas in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.nanochat.gpt import GPT
from nano_inference.rl.exact import Policy, train_logprobs
from tests.nanochat.plain import logits_with_graph
from tests.nanochat.tiny import GENERATIONS, base_meta, write_checkpoint
from tests.rl.exact_checks import sampled, texts_of

PROMPTS = [list(range(3, 33)), [12, 4]]
CASES = [(name, ()) for name in GENERATIONS] + [("G2", ("decode_window=full", "short_window=24"))]


@pytest.mark.parametrize(("generation", "overrides"), CASES, ids=str)
def test_gradients_are_those_of_the_formulas(generation: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, generation, meta=base_meta(generation))
    gpt = GPT.from_checkpoint(path, device="cpu", dtype="float32", overrides=overrides)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 8 << 20, "overrides": overrides}
    with InferenceEngine(EngineConfig(str(tmp_path), device="cpu", **options)) as engine:
        leaves = {name: torch.nn.Parameter(value.double()) for name, value in gpt.weights.items()}
        policy = Policy(engine, leaves)
        policy.sync()
        samples = engine.generate(PROMPTS, SamplingParams(max_tokens=40, seed=3, temperature=0.8, ignore_eos=True), 2)
        values = train_logprobs(policy, samples, temperature=0.8)
        assert torch.equal(values, sampled(samples))
        weight_N = torch.randn(len(values), generator=torch.Generator().manual_seed(0))
        (values * weight_N).sum().backward()
    ours = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    plain: Any = SimpleNamespace(model=gpt.model, terms=gpt.terms, weights=leaves)
    found = []
    for ids, start in zip(*texts_of(samples), strict=True):
        num_prompt = start if gpt.model.program.has_full_decode else None
        logits_TV = logits_with_graph(plain, torch.tensor([ids]), num_prompt)[0, start - 1 : -1] / 0.8
        found.append(logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0])
    theirs_N = torch.cat(found)
    assert (theirs_N - values).abs().max() <= 1e-5
    (theirs_N * weight_N).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None and (ours[name] - leaf.grad).norm() <= 1e-12 * leaf.grad.norm(), name
