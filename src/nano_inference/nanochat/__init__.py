"""Replacement for karpathy/nanochat's inference: `Engine`, the model in every generation, tokenizer, checkpoints.

Modules have upstream's names: `engine`, `gpt`, `tokenizer`, `checkpoint_manager`, `common`. Names are imported at first
use, so that entry points can be loaded without torch.
"""

from __future__ import annotations

import importlib

from nano_inference.support.packages import needed

_HOMES = {
    "GPT": "gpt",
    "Engine": "engine",
    "GPTConfig": "gpt",
    "KVCache": "engine",
    "RowState": "engine",
    "RustBPETokenizer": "tokenizer",
    "eval_with_timeout": "engine",
    "get_tokenizer": "tokenizer",
    "load_model": "checkpoint_manager",
    "sample_next_token": "engine",
    "timeout": "engine",
    "use_calculator": "engine",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name at its first use. Raises `MissingPackage` if its module needs a package not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nano_inference.nanochat' has no attribute {name!r}")
    with needed("nano_inference.nanochat"):
        return getattr(importlib.import_module(f"nano_inference.nanochat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
