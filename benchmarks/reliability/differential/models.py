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
from tests.models.hybrids import HYBRIDS, F, L, make_hybrid

MODELS = (*sorted(FAMILIES), *(f"hybrid-{name}" for name in sorted(HYBRIDS)))
"""Families and, with recurrent states, models of one."""
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
    state_bytes: int = 0
    """Of one slot of recurrent states."""

    def cache_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a cache of so many tokens; with states as many again, at least for two slots."""
        num_bytes = num_tokens * self.kv_bytes_per_token
        return 2 * max(num_bytes, 2 * self.state_bytes) if self.state_bytes else num_bytes


def make_checkpoint(family: str, rng: random.Random, directory: Path) -> Checkpoint:
    """Write a random model of the family into `directory`, with a random small vocabulary."""
    is_hybrid = family.startswith("hybrid-")
    family = family.removeprefix("hybrid-")
    kind, options = (HYBRIDS if is_hybrid else FAMILIES)[family]
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
    if is_hybrid:
        del more["num_hidden_layers"]
    model = (make_hybrid if is_hybrid else make_model)(family, directory, more)
    model.set_attn_implementation("eager")
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_layers = config.layer_types.count(F) if is_hybrid else config.num_hidden_layers
    return Checkpoint(
        directory=directory,
        model=model,
        vocab_size=size,
        eos=frozenset([eos] if isinstance(eos, int) else eos or ()),
        kv_bytes_per_token=2 * 4 * num_kv_layers * config.num_key_value_heads * head_dim,
        state_bytes=config.layer_types.count(L) * _state_bytes(config) if is_hybrid else 0,
    )


def _state_bytes(config: transformers.PretrainedConfig) -> int:
    """Return the bytes of one layer's state: the convolution's last inputs and the rule's matrices, in float32."""
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads
    channels = 2 * keys + values * config.linear_value_head_dim
    return 4 * (
        (config.linear_conv_kernel_dim - 1) * channels
        + values * config.linear_key_head_dim * config.linear_value_head_dim
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
