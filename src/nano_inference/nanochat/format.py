"""nanochat's checkpoint format: opens its own files, exported directories, Transformers' port, and models in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nano_inference.loading.fields import Fields, read_json
from nano_inference.loading.formats import ModelFormat
from nano_inference.loading.opened import Checkpoint, main_dtype
from nano_inference.loading.pt_file import read_pt, unwrapped
from nano_inference.loading.safetensors_file import open_weights
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.nanochat.checkpoint import Inferred, infer, override_values, parse_overrides
from nano_inference.nanochat.configs import MAX_LAYERS, OWN_TYPE, hf_nanochat_config, is_exported, nanochat_config
from nano_inference.nanochat.files import TOKENIZER_FILES, NanochatFiles, find_files
from nano_inference.nanochat.kinds import TOKENIZER
from nano_inference.nanochat.names import ASSISTANT_END, BOS_TOKENS
from nano_inference.support.files import is_present
from nano_inference.text.kinds import TokenizerKind, TokenizerSource
from nano_inference.text.tokenizer import OWN_TOKENIZERS, load_tokenizer
from nano_inference.text.tools import special_tokens
from nano_inference.types import BadRequest, ModelError

TOKENIZERS: Mapping[str, TokenizerKind] = {**OWN_TOKENIZERS, "nanochat": TOKENIZER}
"""Tokenizers that a nanochat checkpoint can have."""
_TITLE = "a nanochat checkpoint"
_SMALL = 4096  # most values of a weight that is tested for zeros
_FILL: Mapping[str, float] = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}
"""Values for a missing weight, as in upstream's loader."""
_END_FROM_LAST = (5, 9)
"""Distance of assistant_end and bos from the vocabulary's end, in nanochat's order of special tokens."""


def open_path(path: Path, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open nanochat's own files in any layout, a directory written by `models export`, or one of Transformers' port.

    Maps a .pt file into memory. Raises `ModelError` for a damaged path or one with none of these, and `BadRequest`
    for overrides of the port, whose config.json has every constant.
    """
    by_hand = parse_overrides(overrides)
    if not is_exported(path):
        files = find_files(path)
        if files is None:
            raise ModelError(f"{path}: is not {_TITLE}")
        return open_nanochat(files, by_hand)
    if read_json(path / "config.json").text("model_type", "").startswith(OWN_TYPE):
        return open_own(path, by_hand)
    if by_hand:
        raise BadRequest("overrides", f"{path} is not {_TITLE}; only its constants can be overridden")
    return open_hf_nanochat(path)


def _recognises(path: Path) -> bool:
    if path.is_dir() and is_present(path / "config.json"):
        return is_exported(path)
    return find_files(path) is not None


FORMAT = ModelFormat(title=_TITLE, recognises=_recognises, open=open_path, takes_overrides=True)


def open_nanochat(files: NanochatFiles, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open a checkpoint's `.pt` and meta files; `overrides` are the user's `name=value` texts.

    Raises `ModelError` naming a file that is damaged, of unknown generation or contradicts another, and `BadRequest`
    for an invalid override.
    """
    tensors = read_pt(files.weights)
    meta = read_json(files.meta)
    return _open(
        files.weights,
        {name: TensorSource(tensor) for name, tensor in tensors.items()},
        meta.within("model_config"),
        TokenizerSource(str(files.tokenizer or files.weights.parent)),
        user_config=meta.mapping("user_config") if files.source in (None, "base") else {},
        overrides=parse_overrides(overrides),
        commit=files.git_commit,
    )


def open_tensors(
    weights: Mapping[str, torch.Tensor], model_config: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Checkpoint:
    """Open a model in memory, such as one in training; `model_config` as in meta files."""
    config = Fields("model_config", model_config)
    return _open(Path("model"), named_sources(weights), config, None, overrides=parse_overrides(overrides))


def named_sources(weights: Mapping[str, torch.Tensor]) -> dict[str, WeightSource]:
    """Return tensors as sources, without prefixes of torch's wrappers. Raises `ModelError` for duplicate names."""
    named: dict[str, WeightSource] = {
        unwrapped(name): TensorSource(tensor.detach()) for name, tensor in weights.items()
    }
    if len(named) < len(weights):
        raise ModelError("weights: a name occurs twice, with and without a wrapper's prefix")
    return named


def open_own(directory: Path, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open an exported directory of safetensors with nanochat's names and every constant in `config.json`."""
    by_hand, config = parse_overrides(overrides), read_json(directory / "config.json")
    constants: Mapping[str, Any] = config.mapping("constants")
    written = {name: str(value) for name, value in constants.items() if value not in (0, 0.0, None)}
    try:
        override_values(parse_overrides(written))
    except ValueError as error:
        raise ModelError(f"{config.origin}: constants: {error}") from None
    source, model_config = TokenizerSource(str(directory)), config.within("model_config")
    checkpoint = _open(directory, open_weights(directory), model_config, source, overrides=written | by_hand)
    assert isinstance(checkpoint.inferred, Inferred)
    reasons = {**checkpoint.inferred.reasons, **dict.fromkeys(written.keys() - by_hand.keys(), "config.json")}
    inferred = replace(checkpoint.inferred, reasons=MappingProxyType(reasons), warnings=())
    return replace(checkpoint, inferred=inferred)


def open_hf_nanochat(directory: Path) -> Checkpoint:
    """Open a directory of Transformers' port (G0)."""
    path = directory / "generation_config.json"
    generation = read_json(path) if is_present(path) else None
    sources = open_weights(directory)
    return Checkpoint(
        path=directory,
        config=hf_nanochat_config(read_json(directory / "config.json"), generation),
        tokenizer=TokenizerSource(str(directory)),
        dtype=main_dtype(directory, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType(dict(generation.values) if generation else {}),
    )


def _open(
    path: Path,
    weights: Mapping[str, WeightSource],
    config: Fields,
    tokenizer: TokenizerSource | None,
    *,
    user_config: Mapping[str, Any] = MappingProxyType({}),
    overrides: Mapping[str, str],
    commit: str | None = None,
) -> Checkpoint:
    """Infer the generation and return the checkpoint."""
    origin, sources = str(path), dict(weights)
    shapes = {name: source.shape for name, source in sources.items()}

    def is_zero(name: str) -> bool:
        if math.prod(shapes[name]) > _SMALL:
            return False
        values = torch.empty(shapes[name])
        sources[name].read_into(values)
        return not values.any()

    inferred = infer(
        origin, shapes, config, user_config=user_config, is_zero=is_zero, overrides=overrides, commit=commit
    )
    missing = [name for name in _FILL if name not in sources]
    if len(missing) == 1:  # one of the two kinds of lambdas
        name = missing[0]
        sources[name] = TensorSource(torch.full((config.integer("n_layer", high=MAX_LAYERS),), _FILL[name]))
        note = f"the weights have no {name}: {_FILL[name]:g} is used for each layer, as upstream does"
        inferred = replace(inferred, warnings=(*inferred.warnings, note))
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
    if source is None or not any((Path(source.path) / name).is_file() for name in TOKENIZER_FILES):
        end, bos = (model.vocab_size - place for place in _END_FROM_LAST)
        return {"eos_token_ids": (end, bos), "bos_token_id": bos} if bos >= 0 else {}
    tokenizer = load_tokenizer(source, TOKENIZERS)
    if tokenizer.vocab_size != model.vocab_size:
        sizes = f"vocab_size is {model.vocab_size}, but the tokenizer in {source.path} has {tokenizer.vocab_size}"
        raise ModelError(f"{origin}: {sizes}")
    special = special_tokens(tokenizer)
    ends = [special[name] for name in (ASSISTANT_END, *BOS_TOKENS) if name in special]
    bos_id = next((special[name] for name in BOS_TOKENS if name in special), tokenizer.bos_id)
    return {"eos_token_ids": tuple(ends) or tokenizer.eos_ids, "bos_token_id": bos_id}
