"""What opening a model's files gives, whatever their format."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.loader.inferred import Inferred
from nano_inference.loader.sources import WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.text.kinds import TokenizerSource
from nano_inference.types import MODELS_OWN, ModelError, SamplingParams

_SPARE = 1 << 23
"""Values, 32 MB: a small model that does not fit its configuration is told so by its weights' names, when loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's files, opened: what it is, and where its weights lie.

    Raises `ModelError` for a configuration of a model much larger than the weights are.
    """

    path: Path
    config: ModelConfig
    tokenizer: TokenizerSource
    dtype: str
    """The precision of most of the file: "float32", "bfloat16", "Q4_1", …"""
    sources: Mapping[str, WeightSource]
    """Every weight under its checkpoint's name, in the order of the files' bytes."""
    generation: Mapping[str, Any]
    """Sampling defaults from `generation_config.json`; empty when there are none."""
    inferred: Inferred | None = None
    """What the files leave open and how it was inferred; None for formats whose files say everything."""

    def __post_init__(self) -> None:
        held = sum(math.prod(source.shape) for source in self.sources.values())
        wanted = fewest_values(self.config)
        if wanted > 2 * held + _SPARE:
            raise ModelError(
                f"{self.path}: the configuration makes a model of at least {wanted} values, the files hold {held}"
            )

    @property
    def num_parameters(self) -> int:
        """How many numbers the model holds in memory; tied embeddings count once."""
        tied = {"lm_head.weight"} if self.config.tie_embeddings else set()
        return sum(math.prod(source.shape) for name, source in self.sources.items() if name not in tied)

    def tensors(self) -> Iterator[tuple[str, WeightSource]]:
        """Return a fresh iterator over the weights, for `load_into`."""
        return iter(self.sources.items())


def generation_fields(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the sampling fields that the model's generation_config.json names, unchecked."""
    named = {name: checkpoint.generation.get(name) for name in MODELS_OWN}
    return {name: value for name, value in named.items() if value is not None}


def sampling_defaults(checkpoint: Checkpoint, without: Collection[str] = ()) -> Mapping[str, Any]:
    """Return what the model's own files set for whoever does not say; fields in `without` somebody has said.

    To be asked at the start, not with every request, whose client could not help it: raises `ModelError` for what makes
    no sense.
    """
    chosen = {name: value for name, value in generation_fields(checkpoint).items() if name not in without}
    try:
        SamplingParams(**chosen)
    except ValueError as error:
        raise ModelError(f"{checkpoint.path}: generation_config.json: {error}") from None
    return chosen


def fewest_values(config: ModelConfig) -> int:
    """Return how many values a model has at least: the embedding, and each layer's attention and two of its MLP."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (config.vocab_size + config.num_layers * (heads + 2 * config.intermediate_size))


def main_dtype(path: Path, sources: Mapping[str, WeightSource]) -> str:
    """Return the precision of most of the weights' values. Raises `ModelError` naming `path` when there are none."""
    sizes: dict[str, int] = {}
    for source in sources.values():
        sizes[source.dtype] = sizes.get(source.dtype, 0) + math.prod(source.shape)
    if not sizes:
        raise ModelError(f"{path}: holds no tensors")
    return max(sizes, key=lambda name: sizes[name])
