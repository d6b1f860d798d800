"""Where models and their tokenizers lie. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from nano_inference.catalog import default_cache, resolve
from nano_inference.cli.options import Common
from nano_inference.cli.terminal import bar
from nano_inference.loader.gguf_file import read_gguf
from nano_inference.loader.listing import only_gguf
from nano_inference.types import TokenizerSource


def cache_of(common: Common) -> Path:
    """Return the directory of fetched models."""
    return common.cache or default_cache(os.environ)


def fetch(name: str, common: Common) -> Path:
    """Return where a model lies, fetching it when it is not here."""
    with bar(f"fetching {name}", is_bytes=True, quiet=common.quiet) as tell:
        return resolve(name, cache_of(common), progress=tell)


def tokenizer_source(path: Path) -> TokenizerSource:
    """Return a model's tokenizer files: a directory with a configuration, or a GGUF file's metadata."""
    if path.is_dir() and (path / "config.json").is_file():
        return TokenizerSource(str(path))
    file = read_gguf(only_gguf(path) if path.is_dir() else path)
    return TokenizerSource(str(file.path), file.metadata)
