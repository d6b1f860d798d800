"""Comparisons of whole engines that tests/gpu makes on a GPU, and tests/cuda on CPU tensors for a few models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nano_inference import InferenceEngine, SamplingParams
from tests.cuda.models import largest_gap, prompts, write_model

Open = Callable[[Path], InferenceEngine]
MOST_NEW = 40
HALF_NAMES = ("llama3-rope-ratio3-tied", "mistral-window", "qwen2-ratio7", "qwen3-ratio3-tied", "gemma2", "G4", "plain")
"""Models that are compared in half precision: each kind of head norm, window, soft cap and ratio."""
HALF_BOUNDS = {"bfloat16": 0.2, "float16": 0.025}
"""Twice what plain kernels have at most. Sums in another order move few roundings, which then spread."""


def float32_gap(name: str, directory: Path, open_engine: Open) -> float:
    """Return the largest difference from another program: of short, long and shared prompts, decoded together."""
    reference = write_model(name, directory)
    with open_engine(directory) as engine:
        assert engine.parts.code == "cuda"
        vocab_size, longest = engine.parts.vocab_size, engine.parts.max_model_len - MOST_NEW
        long = [index * index % vocab_size for index in range(longest)]
        asked = [*prompts(vocab_size, longest), long]
        params = [SamplingParams(max_tokens=MOST_NEW, seed=seed, ignore_eos=True) for seed in range(len(asked))]
        samples = engine.generate(asked, params)
    assert all(len(sample.completion_tokens) == MOST_NEW for sample in samples)
    return largest_gap(samples, reference)


def half_gap(name: str, directory: Path, open_engine: Open, open_torch: Open) -> float:
    """Return the largest difference of log-probabilities from the torch executor in the same precision."""
    write_model(name, directory)
    with open_engine(directory) as engine:
        assert engine.parts.code == "cuda"
        asked = prompts(engine.parts.vocab_size, engine.parts.max_model_len - MOST_NEW)
        params = [SamplingParams(max_tokens=MOST_NEW, seed=seed, ignore_eos=True) for seed in range(len(asked))]
        samples = engine.generate(asked, params)
    worst = 0.0
    with open_torch(directory) as engine:
        assert engine.parts.code == "torch"
        for sample in samples:
            scores = engine.score([*sample.prompt_tokens, *sample.completion_tokens])[-MOST_NEW:]
            worst = max(worst, *(abs(a - b) for a, b in zip(scores, sample.logprobs, strict=True)))
    return worst
