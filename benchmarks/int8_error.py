"""Compare the default model's log-probabilities with dtype int8 and bfloat16 to the exact ones.

    python benchmarks/int8_error.py

The exact engine writes texts at temperature 1; every engine then scores the same tokens. Prints, for each, the root
mean square and the largest difference of the tokens' log-probabilities, the mean divergence KL(exact || rounded) of
whole distributions, and how often the likeliest token is the same. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.step_input import ForwardInput, Span


def logits_of(engine: InferenceEngine, ids: list[int]) -> Tensor:
    """Return float32 logits [T, V] of one text, computed in one step in the cache's first blocks."""
    runner = engine.parts.runner
    assert isinstance(runner, CpuExecutor)
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    span = Span(0, len(ids), 0, tuple(range(-(-len(ids) // runner.store.block_size))))
    previous = torch.cat([torch.tensor([-1]), tokens[:-1]])
    step = ForwardInput(token_T=tokens, prev_T=previous, position_T=positions, slot_T=positions, spans=(span,))
    return runner.forward(step, runner.store).clone()


def texts_of(engine: InferenceEngine, count: int, size: int) -> list[list[int]]:
    """Return texts that the model writes by itself, each from one token."""
    params = SamplingParams(max_tokens=size, seed=0, ignore_eos=True)
    samples = engine.generate([[504 + index] for index in range(count)], params)
    return [[504 + index, *sample.completion_tokens] for index, sample in enumerate(samples)]


def compare(exact: Tensor, rounded: Tensor, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every position but the last, the token's difference, the divergence, and whether the best agrees."""
    own, other = exact[:-1].double().log_softmax(-1), rounded[:-1].double().log_softmax(-1)
    target = torch.tensor(ids[1:]).unsqueeze(-1)
    gap = (own.gather(-1, target) - other.gather(-1, target)).squeeze(-1)
    return gap, (own.exp() * (own - other)).sum(-1), own.argmax(-1) == other.argmax(-1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    with InferenceEngine(EngineConfig(model_path=arguments.model)) as engine:
        texts = texts_of(engine, arguments.texts, arguments.tokens)
        exact = [logits_of(engine, ids) for ids in texts]
    found = {}
    for dtype in ("bfloat16", "int8"):
        with InferenceEngine(EngineConfig(model_path=arguments.model, dtype=dtype)) as engine:
            parts = [compare(own, logits_of(engine, ids), ids) for own, ids in zip(exact, texts, strict=True)]
        gap, divergence, agrees = (torch.cat(each) for each in zip(*parts, strict=True))
        found[dtype] = {
            "tokens": gap.numel(),
            "rms": float(gap.square().mean().sqrt()),
            "largest": float(gap.abs().max()),
            "kl": float(divergence.mean()),
            "same_best": float(agrees.float().mean()),
        }
        row = found[dtype]
        print(
            f"{dtype:9} {row['tokens']} tokens: log-probabilities off by {row['rms']:.4f} (rms), "
            f"{row['largest']:.3f} at most; KL {row['kl']:.5f}; same best token {100 * row['same_best']:.1f} %"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
