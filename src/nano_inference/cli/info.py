"""`models info`: a model's architecture, files and memory use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from nano_inference.build import end_token_ids
from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.loading.kinds import ModelKinds, installed_kinds
from nano_inference.models.config import RopeConfig
from nano_inference.text.dialogue import load_dialogue
from nano_inference.text.tokenizer import kind_of, load_tokenizer

_FLOAT32 = 4


def show_info(name: str, overrides: Sequence[str], as_json: bool, common: Common) -> int:
    """Print the facts of a model, fetching it if necessary."""
    kinds = installed_kinds()
    facts = describe(open_checkpoint(fetch(name, common), overrides, kinds.formats), kinds)
    if as_json:
        print(json.dumps(facts))
        return 0
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):<{width}}  {_shown(key, value)}")
    return 0


def describe(checkpoint: Checkpoint, kinds: ModelKinds) -> dict[str, Any]:
    """Return the facts of a model as JSON values."""
    config, path, source = checkpoint.config, checkpoint.path, checkpoint.tokenizer
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    tokenizer = load_tokenizer(source, kinds.tokenizers)
    kind = None if source.gguf is not None else kind_of(Path(source.path), kinds.tokenizers)
    own = "none" if kind is None else kind.description
    facts = {
        "path": str(path),
        "architecture": config.architecture,
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "windows": dict(Counter("full" if layer.window is None else str(layer.window) for layer in config.layers)),
        "ropes": [_rope(rope) for rope in config.ropes],
        "tied_embeddings": config.tie_embeddings,
        "file_precision": checkpoint.dtype,
        "file_bytes": sum(file.stat().st_size for file in files),
        "parameters": checkpoint.num_parameters,
        "float32_bytes": checkpoint.num_parameters * _FLOAT32,
        "kv_bytes_per_token": config.kv_bytes_per_token(_FLOAT32),
        "tokenizer": own if source.gguf is None else f"gguf ({source.gguf.get('tokenizer.ggml.model')})",
        "chat_template": load_dialogue(source, tokenizer, kinds.tokenizers) is not None,
        "end_tokens": {token: tokenizer.token_text(token) for token in sorted(end_token_ids(config, tokenizer))},
    }
    if (inferred := checkpoint.inferred) is not None:  # constants that the files do not name
        constants = {name: {"value": one.value, "reason": one.reason} for name, one in inferred.values.items()}
        facts |= {"constants": constants, "warnings": list(inferred.warnings)}
    return facts


def _rope(rope: RopeConfig) -> str:
    """Describe a rotary embedding; the dtype of its tables is named if it is not float32."""
    rounded = "" if rope.table_dtype == "float32" else f", tables in {rope.table_dtype}"
    return f"{rope.kind}, theta {rope.theta:g}, {rope.rotary_dim} dimensions{rounded}"


def _shown(key: str, value: Any) -> str:
    """Format one fact."""
    if key == "windows":
        return ", ".join(f"{window} in {count} layers" for window, count in value.items())
    if key == "constants":
        return "".join(f"\n  {name} = {one['value']} ({one['reason']})" for name, one in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{inner} {text}" for inner, text in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes") or key == "kv_bytes_per_token":
        return f"{value:,} ({decimal(value)})"
    return f"{value:,}" if isinstance(value, int) else str(value)
