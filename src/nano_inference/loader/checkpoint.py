"""Opens a model's files, whatever their format: cheap checks at once, weights lazily."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nano_inference.loader.door import WeightSource
from nano_inference.loader.fields import read_json
from nano_inference.loader.gguf import gguf_sources, main_type
from nano_inference.loader.gguf_config import gguf_config
from nano_inference.loader.gguf_file import read_gguf
from nano_inference.loader.hf_config import model_config
from nano_inference.loader.listing import PICKLED, only_gguf
from nano_inference.loader.safetensors_file import num_bytes, open_weights
from nano_inference.models.config import ModelConfig
from nano_inference.types import ModelError, TokenizerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's files, opened: what it is, and where its weights lie."""

    path: Path
    config: ModelConfig
    tokenizer: TokenizerSource
    dtype: str
    """The precision of most of the file: "float32", "bfloat16", "Q4_1", …"""
    sources: Mapping[str, WeightSource]
    """Every weight under its Hugging Face name, in the order of the files' bytes."""
    generation: Mapping[str, Any]
    """Sampling defaults from `generation_config.json`; empty when there are none."""

    def tensors(self) -> Iterator[tuple[str, WeightSource]]:
        """Return a fresh iterator over the weights, for `load_into`."""
        return iter(self.sources.items())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file, or a directory that holds one .gguf file and no config.json.

    Reads headers and configuration only. Raises `ModelError` when something is missing, damaged or not supported.
    """
    path = Path(path)
    if not _exists(path):
        raise ModelError(f"{ascii(str(path))[1:-1]}: no such file or directory")
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise ModelError(f"{path}: neither a file nor a directory")
    if (path / "config.json").is_file():
        return _open_directory(path)
    return _open_gguf(only_gguf(path))


def _exists(path: Path) -> bool:
    """A name that cannot be a path (too long, a zero byte) is one that does not exist."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


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


def _open_directory(directory: Path) -> Checkpoint:
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else None
    config = model_config(read_json(directory / "config.json"), generation)
    sources = open_weights(directory)
    sizes: dict[str, int] = {}
    for part in sources.values():
        sizes[part.dtype] = sizes.get(part.dtype, 0) + num_bytes(part)
    if not sizes:
        raise ModelError(f"{directory}: the safetensors files hold no tensors")
    return Checkpoint(
        path=directory,
        config=config,
        tokenizer=TokenizerSource(str(directory)),
        dtype=max(sizes, key=lambda name: sizes[name]),
        sources=MappingProxyType(sources),
        generation=MappingProxyType(dict(generation.values) if generation else {}),
    )
