"""Tiny models of every family with head sizes that the Triton kernels have, and references for their numbers.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference import EngineConfig, TrainingSample
from nano_inference.nanochat.gpt import GPT
from tests.models.families import FAMILIES, gap_to, make_model, reference_logprobs
from tests.models.hybrids import HYBRIDS, make_hybrid
from tests.nanochat.plain import plain_logits
from tests.nanochat.tiny import GENERATIONS, base_meta, model_config, write_checkpoint

NAMES = (*FAMILIES, *GENERATIONS)
HEAD_DIM = 16
"""The smallest of `records.HEAD_DIMS`; also that of nanochat's tiny models."""
Reference = Callable[[list[int]], Tensor]
"""Returns the log-probabilities [T - 1, V] of the tokens after each prefix of a text, float32, of another program."""


def wide_heads(name: str) -> dict[str, Any]:
    """Return the fields that give a family's model heads of `HEAD_DIM` values."""
    _, options = FAMILIES[name]
    return {"hidden_size": HEAD_DIM * options["num_attention_heads"]}


def write_model(name: str, directory: Path) -> Reference:
    """Write a model; the reference is Transformers, for nanochat its formulas."""
    if name in HYBRIDS:
        return partial(reference_logprobs, make_hybrid(name, directory))
    if name in FAMILIES:
        return partial(reference_logprobs, make_model(name, directory, wide_heads(name)))
    path = write_checkpoint(directory, name, config=model_config(name, sequence_len=512), meta=base_meta(name))
    return partial(_plain_logprobs, path)


def _plain_logprobs(path: Path, tokens: list[int]) -> Tensor:
    model = GPT.from_checkpoint(path, device="cpu", dtype="float32")
    return plain_logits(model, torch.tensor([tokens]))[0, :-1].double().log_softmax(-1).float()


def config_of(path: Path, **options: Any) -> EngineConfig:
    """Return the configuration of an engine on CPU tensors."""
    return EngineConfig(
        model_path=str(path), device="cpu", num_threads=1, seed=5,
        **{"max_model_len": 512, "max_batch_size": 8, "kv_cache_bytes": 16 << 20, **options},
    )  # fmt: skip


def largest_gap(samples: Sequence[TrainingSample], reference: Reference) -> float:
    """Return the largest difference between the samples' log-probabilities and the reference's."""
    texts = ([*sample.prompt_tokens, *sample.completion_tokens] for sample in samples)
    return max(gap_to(reference(text), text, list(one.logprobs)) for text, one in zip(texts, samples, strict=True))


def prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Return prompts of one token to `longest`; four share a prefix of 300 tokens if that fits."""
    rng = random.Random(2)
    found = [[rng.randrange(vocab_size) for _ in range(size)] for size in (1, 2, 17, 40)]
    common = [rng.randrange(vocab_size) for _ in range(min(300, longest - 8))]
    return found + [[*common, *(rng.randrange(vocab_size) for _ in range(size))] for size in (1, 3, 4, 7)]
