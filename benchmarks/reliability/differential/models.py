"""Random tiny checkpoints of every supported family, made by Transformers in float32, and further weights for them."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.families import FAMILIES, make_model

MAX_POSITIONS = 256
_NEEDS_ALL_LAYERS = ("SmolLM3", "Gemma3")
"""Which layers have rope, or a window, follows from their number: fewer would leave only one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk and Transformers' model of it."""

    directory: Path
    model: transformers.PreTrainedModel
    vocab_size: int
    eos: frozenset[int]
    kv_bytes_per_token: int


def make_checkpoint(family: str, rng: random.Random, directory: Path) -> Checkpoint:
    """Write a random model of the family into `directory`, with a random small vocabulary."""
    kind, options = FAMILIES[family]
    size = rng.randrange(64, 320)
    eos = rng.choice([None, None, rng.randrange(size), [rng.randrange(size), rng.randrange(size)]])
    more: dict[str, Any] = {
        "vocab_size": size,
        "intermediate_size": rng.choice([40, 80, 97]),
        "num_hidden_layers": 4 if kind in _NEEDS_ALL_LAYERS else rng.choice([1, 2, 4]),
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": eos,
    }
    more = {name: value for name, value in more.items() if name not in options}
    if options.get("sliding_window") is not None:
        more["sliding_window"] = rng.choice([5, 16, options["sliding_window"], 64])
    model = make_model(family, directory, more)
    model.set_attn_implementation("eager")
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Checkpoint(
        directory=directory,
        model=model,
        vocab_size=size,
        eos=frozenset([eos] if isinstance(eos, int) else eos or ()),
        kv_bytes_per_token=2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim,
    )


@torch.no_grad()
def changed(
    model: transformers.PreTrainedModel, rng: random.Random, names: Collection[str] | None = None
) -> transformers.PreTrainedModel:
    """Return a copy whose parameters (those of `names`, or all) differ enough to change every log-probability.

    Their spread stays. It grew with each update before, and after six of them one rounding of float32 in each layer
    moved log-probabilities by up to 2e-4: no computation in float32 can agree to 1e-4 on such a model.
    """
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(rng.randrange(2**62))
    for name, weight in other.named_parameters():
        if names is None or name in names:
            spread, center = (float(weight.std()), weight.mean()) if weight.numel() > 1 else (0.4, weight.clone())
            noise = torch.randn(weight.shape, generator=generator) * spread / 2
            weight.copy_(center + (weight - center + noise) / 1.25**0.5)
    return other


def named(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what a trainer sends: each parameter once, under its Hugging Face name."""
    return {name: weight.detach() for name, weight in model.named_parameters()}
