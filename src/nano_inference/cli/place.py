"""Locations of models and their tokenizers. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from nano_inference.cli.options import Common
from nano_inference.cli.terminal import bar
from nano_inference.loading.catalog import default_cache, names_path, resolve
from nano_inference.loading.gguf_file import read_gguf
from nano_inference.loading.listing import only_gguf
from nano_inference.support.files import exists, is_present, path_of
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import installed_tokenizers


def cache_of(common: Common) -> Path:
    """Return the directory of fetched models."""
    return path_of(common.cache, "--cache") if common.cache else default_cache(os.environ)


def fetch(name: str, common: Common) -> Path:
    """Return a model's path, fetching the model if it is not in the cache."""
    with bar(f"fetching {name}", is_bytes=True, quiet=common.quiet) as progress:
        return resolve(name, cache_of(common), progress=progress)


def for_any_directory(name: str, path: Path) -> str:
    """Return a model's name for a process with another current directory: `path`, made absolute, for a local model."""
    return str(path.absolute()) if names_path(name) and exists(path_of(name, "model")) else name


def tokenizer_source(path: Path) -> TokenizerSource:
    """Return a model's tokenizer: files next to config.json, an installed kind's, or a GGUF file's metadata."""
    if path.is_dir() and is_present(path / "config.json"):
        return TokenizerSource(str(path))
    for kind in reversed([*installed_tokenizers().values()]):
        if (source := kind.find(path)) is not None:
            return source
    file = read_gguf(only_gguf(path) if path.is_dir() else path)
    return TokenizerSource(str(file.path), file.metadata)
