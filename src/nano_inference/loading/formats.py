"""An opened model of any format, and `ModelFormat`, which recognises and opens the files of one format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_inference.loading.fields import Inferred
from nano_inference.loading.sources import WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.models.parts import HEAD
from nano_inference.text.generation_config import MODELS_OWN
from nano_inference.text.kinds import TokenizerSource
from nano_inference.types import ModelError, SamplingParams

_SPARE = 1 << 23  # values (32 MB): mismatches of small models are reported by weight name, when they are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model: its configuration, and sources of its weights.

    Raises `ModelError` if the configuration describes a model much larger than the weights.
    """

    path: Path
    config: ModelConfig
    tokenizer: TokenizerSource
    dtype: str  # most frequent precision of the weights: "float32", "bfloat16", "Q4_1", …
    sources: Mapping[str, WeightSource]  # every weight, in file order; by the program's name once it is opened
    generation: Mapping[str, Any]  # contents of `generation_config.json`; empty if there is none
    ignored: Mapping[str, WeightSource] = field(default_factory=dict)  # tensors of other parts, by the file's names
    inferred: Inferred | None = None  # values that the files do not contain; None for formats with complete files

    def __post_init__(self) -> None:
        held = sum(math.prod(source.shape) for source in self.sources.values())
        # At least an embedding, attention, and two matrices of each MLP.
        config, heads = self.config, 2 * (self.config.num_heads + self.config.num_kv_heads) * self.config.head_dim
        layers = len(config.kv_layers) * heads + 2 * config.num_layers * config.intermediate_size
        wanted = config.hidden_size * (config.vocab_size + layers)
        if wanted > 2 * held + _SPARE:
            raise ModelError(
                f"{self.path}: the configuration makes a model of at least {wanted} values, the files hold {held}"
            )

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; tied embeddings count once."""
        tied = {HEAD} if self.config.tie_embeddings else set()
        return sum(math.prod(source.shape) for name, source in self.sources.items() if name not in tied)

    def tensors(self) -> Iterator[tuple[str, WeightSource]]:
        """Return an iterator over (name, source) of all weights."""
        return iter(self.sources.items())


def generation_fields(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the sampling fields of the model's generation_config.json, unchecked."""
    named = {name: checkpoint.generation.get(name) for name in MODELS_OWN}
    return {name: value for name, value in named.items() if value is not None}


def sampling_defaults(checkpoint: Checkpoint, without: Collection[str] = ()) -> Mapping[str, Any]:
    """Return the sampling defaults from the model's files, except the fields in `without`.

    Raises `ModelError` for invalid values; call it at start-up, not per request.
    """
    chosen = {name: value for name, value in generation_fields(checkpoint).items() if name not in without}
    try:
        SamplingParams(**chosen)
    except ValueError as error:
        raise ModelError(f"{checkpoint.path}: generation_config.json: {error}") from None
    return chosen


def main_dtype(path: Path, sources: Mapping[str, WeightSource]) -> str:
    """Return the precision with the most values. Raises `ModelError` naming `path` if there are no tensors."""
    if not sources:
        raise ModelError(f"{path}: holds no tensors")
    sizes = Counter[str]()
    for source in sources.values():
        sizes[source.dtype] += math.prod(source.shape)
    return sizes.most_common(1)[0][0]


FORMATS_GROUP = "nano_inference.formats"  # entry point group for formats of other packages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """A format of model files, as registered in the table of `loading.checkpoint.installed_formats`."""

    title: str  # name for a path of this format in messages, with an article: "a GGUF file"
    recognises: Callable[[Path], bool]
    """Returns True for a file or directory of this format. May raise `ModelError` if it is ambiguous or damaged."""
    open: Callable[[Path, Iterable[str]], Checkpoint]
    """Opens a path; the second argument is `EngineConfig.overrides`. Raises `ModelError` naming the file."""
    takes_overrides: bool = False  # True if `EngineConfig.overrides` may set constants that the files do not contain
