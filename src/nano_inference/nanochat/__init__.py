"""A drop-in for karpathy/nanochat: its `Engine`, its model in every generation, its tokenizer, its checkpoints.

The modules have upstream's names: `engine`, `gpt`, `tokenizer`, `checkpoint_manager`, `common`. Names are imported when
first asked for, so that what the entry points of this package need is found without torch.
"""

from __future__ import annotations

import importlib

from nano_inference.packages import needed

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
    """Import a public name at its first use. Raises `MissingPackage` if its module needs one that is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nano_inference.nanochat' has no attribute {name!r}")
    with needed("nano_inference.nanochat"):
        return getattr(importlib.import_module(f"nano_inference.nanochat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
