"""Opens a model's files, whatever their format: cheap checks at once, weights lazily."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

from nano_inference.files import exists, is_present, path_of
from nano_inference.loader.fields import Fields, read_json
from nano_inference.loader.gguf import gguf_sources, main_type
from nano_inference.loader.gguf_config import gguf_config
from nano_inference.loader.gguf_file import read_gguf
from nano_inference.loader.hf_config import model_config
from nano_inference.loader.listing import PICKLED, only_gguf
from nano_inference.loader.nanochat import open_hf_nanochat, open_nanochat, open_own
from nano_inference.loader.nanochat_config import HF_TYPE, OWN_TYPE
from nano_inference.loader.nanochat_files import find_files
from nano_inference.loader.nanochat_rules import parse_overrides
from nano_inference.loader.opened import Checkpoint, main_dtype
from nano_inference.loader.safetensors_file import open_weights
from nano_inference.types import BadRequest, ModelError, TokenizerSource

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: str | Path, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file (or a directory that holds one), or a nanochat checkpoint.

    Of nanochat's, any file model_*.pt or directory that `nanochat_files.find_files` knows will do; `overrides` set
    constants by hand ("softcap=20", or a mapping) that such a checkpoint does not carry. Reads headers and
    configuration only (all of a .pt is mapped into memory). Raises `ModelError` when something is missing, damaged or
    not supported, and `BadRequest` for overrides of a model that has no such constants.
    """
    path = Path(path)
    if not exists(path_of(path, "model")):
        raise ModelError(f"{ascii(str(path))[1:-1]}: no such file or directory")
    by_hand = parse_overrides(overrides)
    config = read_json(path / "config.json") if path.is_dir() and is_present(path / "config.json") else None
    if config is not None and config.text("model_type", "").startswith(OWN_TYPE):
        return open_own(path, config, by_hand)
    files = find_files(path) if config is None else None
    if files is not None:
        return open_nanochat(files, by_hand)
    if by_hand:
        raise BadRequest(f"overrides: {path} is not a nanochat checkpoint, whose constants could be set by hand")
    if config is not None:
        return _open_directory(path, config)
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise ModelError(f"{path}: neither a file nor a directory")
    return _open_gguf(only_gguf(path))


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLED:
        raise ModelError(f"{path}: a pickle, which can run code and is never read: convert it to safetensors")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise ModelError(f"{path}: not a .gguf file; for Hugging Face files give the directory")


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = gguf_config(file)
    return Checkpoint(
        path=path,
        config=config,
        tokenizer=TokenizerSource(str(path), file.metadata),
        dtype=main_type(file),
        sources=MappingProxyType(gguf_sources(file, config)),
        generation=MappingProxyType({}),
    )


def _open_directory(directory: Path, fields: Fields) -> Checkpoint:
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if is_present(generation_path) else None
    if fields.get("model_type") == HF_TYPE:
        return open_hf_nanochat(directory, fields, generation)
    config = model_config(fields, generation)
    sources = open_weights(directory)
    return Checkpoint(
        path=directory,
        config=config,
        tokenizer=TokenizerSource(str(directory)),
        dtype=main_dtype(directory, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType(dict(generation.values) if generation else {}),
    )
