"""Open nanochat's checkpoints, exported safetensors directories, and models in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nano_inference.loading.fields import Fields, read_json
from nano_inference.loading.opened import Checkpoint, main_dtype
from nano_inference.loading.pt_file import read_pt, unwrapped
from nano_inference.loading.safetensors_file import open_weights
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.nanochat.configs import MAX_LAYERS, hf_nanochat_config, nanochat_config, own_overrides
from nano_inference.nanochat.files import TOKENIZER_FILES, NanochatFiles
from nano_inference.nanochat.kinds import TOKENIZER
from nano_inference.nanochat.names import ASSISTANT_END, BOS_TOKENS
from nano_inference.nanochat.rules import Inferred, infer, override_values, parse_overrides
from nano_inference.text.kinds import TokenizerKind, TokenizerSource
from nano_inference.text.tokenizer import OWN_TOKENIZERS, load_tokenizer
from nano_inference.text.tools import special_tokens
from nano_inference.types import ModelError

TOKENIZERS: Mapping[str, TokenizerKind] = {**OWN_TOKENIZERS, "nanochat": TOKENIZER}
"""Tokenizers that a nanochat checkpoint can have."""
_SMALL = 4096  # most values of a weight that is tested for zeros
_FILL: Mapping[str, float] = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}
"""Values for a missing weight, as in upstream's loader."""
_END_FROM_LAST = (5, 9)
"""Distance of assistant_end and bos from the vocabulary's end, in nanochat's order of special tokens."""


def open_nanochat(files: NanochatFiles, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open a checkpoint's `.pt` and meta files; `overrides` are the user's `name=value` texts.

    Raises `ModelError` naming a file that is damaged, of unknown generation or contradicts another, and `BadRequest`
    for an invalid override.
    """
    tensors = read_pt(files.weights)
    meta = read_json(files.meta)
    is_base = files.source in (None, "base")
    sources: dict[str, WeightSource] = {name: TensorSource(tensor) for name, tensor in tensors.items()}
    return _open(
        files.weights,
        sources,
        meta.within("model_config"),
        TokenizerSource(str(files.tokenizer or files.weights.parent)),
        user_config=meta.mapping("user_config") if is_base else {},
        overrides=parse_overrides(overrides),
        commit=files.git_commit,
    )


def open_tensors(
    weights: Mapping[str, torch.Tensor], model_config: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Checkpoint:
    """Open a model in memory, such as one in training; `model_config` as in meta files."""
    return _open(
        Path("model"),
        named_sources(weights),
        Fields("model_config", model_config),
        None,
        user_config={},
        overrides=parse_overrides(overrides),
    )


def named_sources(weights: Mapping[str, torch.Tensor]) -> dict[str, WeightSource]:
    """Return tensors as sources, without prefixes of torch's wrappers. Raises `ModelError` for duplicate names."""
    named: dict[str, WeightSource] = {
        unwrapped(name): TensorSource(tensor.detach()) for name, tensor in weights.items()
    }
    if len(named) < len(weights):
        raise ModelError("weights: a name occurs twice, with and without a wrapper's prefix")
    return named


def open_own(directory: Path, config: Fields, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open an exported directory of safetensors with nanochat's names and every constant in `config.json`."""
    by_hand = parse_overrides(overrides)
    written = own_overrides(config)
    try:
        override_values(parse_overrides(written))
    except ValueError as error:
        raise ModelError(f"{config.origin}: constants: {error}") from None
    checkpoint = _open(
        directory,
        dict(open_weights(directory)),
        config.within("model_config"),
        TokenizerSource(str(directory)),
        user_config={},
        overrides=written | by_hand,
    )
    assert isinstance(checkpoint.inferred, Inferred)
    reasons = {**checkpoint.inferred.reasons, **dict.fromkeys(written.keys() - by_hand.keys(), "config.json")}
    inferred = replace(checkpoint.inferred, reasons=MappingProxyType(reasons), warnings=())
    return replace(checkpoint, inferred=inferred)


def open_hf_nanochat(directory: Path, config: Fields, generation: Fields | None) -> Checkpoint:
    """Open a directory of Transformers' port (G0)."""
    sources = open_weights(directory)
    return Checkpoint(
        path=directory,
        config=hf_nanochat_config(config, generation),
        tokenizer=TokenizerSource(str(directory)),
        dtype=main_dtype(directory, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType(dict(generation.values) if generation else {}),
    )


def _open(
    path: Path,
    sources: dict[str, WeightSource],
    config: Fields,
    tokenizer: TokenizerSource | None,
    *,
    user_config: Mapping[str, Any],
    overrides: Mapping[str, str],
    commit: str | None = None,
) -> Checkpoint:
    """Infer the generation and return the checkpoint."""
    origin = str(path)
    shapes = {name: source.shape for name, source in sources.items()}
    inferred = infer(
        origin,
        shapes,
        config,
        user_config=user_config,
        is_zero=lambda name: _is_zero(sources[name]),
        overrides=overrides,
        commit=commit,
    )
    inferred = _fill_lambdas(sources, config, inferred)
    model = nanochat_config(origin, shapes, config, inferred.constants)
    return Checkpoint(
        path=path,
        config=replace(model, **_ends(origin, model, tokenizer)),
        tokenizer=tokenizer or TokenizerSource(origin),
        dtype=main_dtype(path, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType({}),
        inferred=inferred,
    )


def _ends(origin: str, model: ModelConfig, source: TokenizerSource | None) -> dict[str, Any]:
    """Return end tokens and bos of the tokenizer, else by their usual positions in the vocabulary."""
    directory = Path(source.path) if source is not None else None
    if source is None or directory is None or not any((directory / name).is_file() for name in TOKENIZER_FILES):
        end, bos = (model.vocab_size - place for place in _END_FROM_LAST)
        return {"eos_token_ids": (end, bos), "bos_token_id": bos} if bos >= 0 else {}
    tokenizer = load_tokenizer(source, TOKENIZERS)
    if tokenizer.vocab_size != model.vocab_size:
        raise ModelError(
            f"{origin}: vocab_size is {model.vocab_size}, but the tokenizer in {directory} has {tokenizer.vocab_size}"
        )
    special = special_tokens(tokenizer)
    ends = [special[name] for name in (ASSISTANT_END, *BOS_TOKENS) if name in special]
    bos_id = next((special[name] for name in BOS_TOKENS if name in special), tokenizer.bos_id)
    return {"eos_token_ids": tuple(ends) or tokenizer.eos_ids, "bos_token_id": bos_id}


def _is_zero(source: WeightSource) -> bool:
    """Return whether all values of a weight are zero; False for a large weight."""
    if math.prod(source.shape) > _SMALL:
        return False
    values = torch.empty(source.shape)
    source.read_into(values)
    return not values.any()


def _fill_lambdas(sources: dict[str, WeightSource], config: Fields, inferred: Inferred) -> Inferred:
    """If one of the two kinds of lambdas is missing, add it with a warning, as upstream's loader."""
    missing = [name for name in _FILL if name not in sources]
    if len(missing) != 1:
        return inferred
    name = missing[0]
    sources[name] = TensorSource(torch.full((config.integer("n_layer", high=MAX_LAYERS),), _FILL[name]))
    note = f"the weights have no {name}: {_FILL[name]:g} is used for each layer, as upstream does"
    return replace(inferred, warnings=(*inferred.warnings, note))
