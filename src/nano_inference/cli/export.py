"""`models export`: a nanochat model in another format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch, tokenizer_source
from nano_inference.cli.terminal import note
from nano_inference.files import path_of
from nano_inference.loader.checkpoint import open_checkpoint
from nano_inference.loader.nanochat_export import export_hf, export_nanochat, export_safetensors
from nano_inference.loader.nanochat_files import TOKENIZER_FILES

_ROUNDED = (
    "[rotary tables of this generation are bfloat16: Transformers rounds them when it computes in bfloat16; in float32 "
    "its logits differ by about 1e-2]"
)


def export_model(name: str, directory: str, to: str, overrides: Sequence[str], common: Common) -> int:
    """Write a nanochat model in another format and print where."""
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
