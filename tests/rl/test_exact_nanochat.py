"""Exact log-probabilities of nanochat: derivatives are compared with differences of the engine's own scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.rl.exact import Policy, train_logprobs
from tests.nanochat.tiny import GENERATIONS, write_checkpoint

pytestmark = pytest.mark.slow
PROMPTS = [list(range(3, 33)), [12, 4]]
CASES = [(name, ()) for name in GENERATIONS] + [("G2", ("decode_window=full", "short_window=24"))]


@pytest.mark.parametrize(("generation", "overrides"), CASES, ids=str)
def test_values_are_equal_and_derivatives_those_of_the_engine(
    generation: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, generation)
    config = EngineConfig(
        model_path=str(tmp_path), dtype="float32", device="cpu", kv_cache_bytes=8 << 20, overrides=overrides
    )
    params = SamplingParams(max_tokens=40, seed=3, temperature=0.8, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    with InferenceEngine(config) as engine:
        executor = engine.parts.executor
        assert executor is not None
        leaves = {
            name: torch.nn.Parameter(value.float().clone() + 0.02 * torch.randn(value.shape, generator=generator))
            for name, value in executor.weights.values()
        }
        policy = Policy(engine, leaves)
        policy.sync()
        samples = engine.generate(PROMPTS, params, 2)
        values = train_logprobs(policy, samples, temperature=0.8)
        assert torch.equal(values, torch.tensor([value for one in samples for value in one.logprobs]))
        weight_N = torch.randn(len(values), generator=generator)
        (values * weight_N).sum().backward()

        def moved(leaf: torch.nn.Parameter, step: torch.Tensor) -> float:
            with torch.no_grad():
                leaf += step
            policy.sync()
            return float((train_logprobs(policy, samples, temperature=0.8).detach().double() * weight_N).sum())

        wrong = {}
        for name, leaf in leaves.items():
            assert leaf.grad is not None, name
            direction = torch.sign(leaf.grad)
            step = direction * (0.02 / leaf.grad.abs().sum().clamp(min=1.0))
            expected = float((leaf.grad * step).sum())
            found = (moved(leaf, step) - moved(leaf, -2 * step)) / 2
            moved(leaf, step)
            if abs(found - expected) > 0.03 * abs(expected) + 2e-5:
                wrong[name] = (found, expected)
        assert not wrong
