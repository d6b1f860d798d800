"""Where models and their tokenizers lie. No torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nano_inference.catalog import default_cache, find_builtin, nanochat_home, resolve
from nano_inference.cli.fallback import NANOCHAT
from nano_inference.cli.options import Common, NanochatWishes
from nano_inference.cli.terminal import bar
from nano_inference.config import EngineConfig
from nano_inference.files import exists, is_present, path_of
from nano_inference.loader.gguf_file import read_gguf
from nano_inference.loader.listing import only_gguf
from nano_inference.loader.nanochat_config import is_exported
from nano_inference.loader.nanochat_files import find_files
from nano_inference.types import ModelError, TokenizerSource


def cache_of(common: Common) -> Path:
    """Return the directory of fetched models."""
    return path_of(common.cache, "--cache") if common.cache else default_cache(os.environ)


def fetch(name: str, common: Common) -> Path:
    """Return where a model lies, fetching it when it is not here."""
    with bar(f"fetching {name}", is_bytes=True, quiet=common.quiet) as tell:
        return resolve(name, cache_of(common), progress=tell)


def nanochat_engine(config: EngineConfig, wishes: NanochatWishes) -> EngineConfig:
    """Return the configuration of nanochat's chat: the checkpoint that was asked for, on the device it names."""
    builtin = find_builtin(config.model_path)
    named = path_of(config.model_path, "model") if builtin is None else builtin.directory
    base = nanochat_home(os.environ) if config.model_path == NANOCHAT else named
    if not exists(base):
        raise ModelError(f"{base}: no such directory; NANOCHAT_BASE_DIR or --model names nanochat's base directory")
    files = find_files(base, source=wishes.source, model_tag=wishes.model_tag, step=wishes.step)
    is_named = any(value is not None for value in (wishes.source, wishes.model_tag, wishes.step))
    if files is None and (is_named or not is_exported(base)):
        raise ModelError(f"{base}: holds no nanochat checkpoint")
    path = base if files is None else files.weights
    return replace(config, model_path=str(path), device=wishes.device_type or config.device)


def tokenizer_source(path: Path) -> TokenizerSource:
    """Return a model's tokenizer files: beside its config.json, of nanochat, or a GGUF file's metadata."""
    if path.is_dir() and is_present(path / "config.json"):
        return TokenizerSource(str(path))
    files = find_files(path)
    if files is not None:
        return TokenizerSource(str(files.tokenizer or files.weights.parent))
    file = read_gguf(only_gguf(path) if path.is_dir() else path)
    return TokenizerSource(str(file.path), file.metadata)
