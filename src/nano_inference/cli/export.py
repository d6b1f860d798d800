"""`models export`: a nanochat model in another format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch, tokenizer_source
from nano_inference.loader.checkpoint import open_checkpoint
from nano_inference.loader.nanochat_export import export_hf, export_nanochat, export_safetensors
from nano_inference.loader.nanochat_files import TOKENIZER_FILES


def export_model(name: str, directory: str, to: str, overrides: Sequence[str], common: Common) -> int:
    """Write a nanochat model in another format and print where."""
    exporters = {"hf": export_hf, "safetensors": export_safetensors, "nanochat": export_nanochat}
    path = fetch(name, common)
    source = Path(tokenizer_source(path).path)
    has_tokenizer = any((source / name).is_file() for name in TOKENIZER_FILES)
    target = Path(directory).expanduser()
    print(exporters[to](open_checkpoint(path, overrides), source if has_tokenizer else None, target))
    return 0
