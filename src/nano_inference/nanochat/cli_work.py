"""Implementation of the commands in `nanochat/cli.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nano_inference.assemble import environment
from nano_inference.catalog import find_builtin
from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch, tokenizer_source
from nano_inference.cli.terminal import note
from nano_inference.config import EngineConfig
from nano_inference.files import exists, path_of
from nano_inference.loader.checkpoint import open_checkpoint
from nano_inference.nanochat.cli import BASE, NanochatOptions
from nano_inference.nanochat.configs import is_exported
from nano_inference.nanochat.export import export_hf, export_nanochat, export_safetensors
from nano_inference.nanochat.files import TOKENIZER_FILES, find_files, nanochat_home
from nano_inference.types import ModelError

_ROUNDED = (
    "[rotary tables of this generation are bfloat16: Transformers rounds them if it computes in bfloat16; in float32 "
    "its logits differ by about 1e-2]"
)


def chosen_checkpoint(config: EngineConfig, wishes: NanochatOptions) -> EngineConfig:
    """Return the configuration with the path of the chosen checkpoint, and the chosen device."""
    builtin = find_builtin(config.model_path)
    named = path_of(config.model_path, "model") if builtin is None else builtin.directory
    base = nanochat_home(environment()) if config.model_path == BASE else named
    if not exists(base):
        raise ModelError(f"{base}: no such directory; set NANOCHAT_BASE_DIR or --model to nanochat's base directory")
    files = find_files(base, source=wishes.source, model_tag=wishes.model_tag, step=wishes.step)
    is_named = any(value is not None for value in (wishes.source, wishes.model_tag, wishes.step))
    if files is None and (is_named or not is_exported(base)):
        raise ModelError(f"{base}: contains no nanochat checkpoint")
    path = base if files is None else files.weights
    return replace(config, model_path=str(path), device=wishes.device_type or config.device)


def export_model(name: str, directory: str, to: str, overrides: Sequence[str], common: Common) -> int:
    """Write a nanochat model in another format and print its directory."""
    exporters = {"hf": export_hf, "safetensors": export_safetensors, "nanochat": export_nanochat}
    path = fetch(name, common)
    source = Path(tokenizer_source(path).path)
    has_tokenizer = any((source / name).is_file() for name in TOKENIZER_FILES)
    target = path_of(directory, "directory")
    checkpoint = open_checkpoint(path, overrides)
    print(exporters[to](checkpoint, source if has_tokenizer else None, target))
    if to == "hf" and checkpoint.config.ropes[0].table_dtype == "bfloat16":
        note(_ROUNDED, common.quiet)
    return 0
