"""A drop-in for karpathy/nanochat: its `Engine`, its model in every generation, its tokenizer, its checkpoints.

The modules have upstream's names: `engine`, `gpt`, `tokenizer`, `checkpoint_manager`, `common`.
"""

from __future__ import annotations

from nano_inference.packages import needed

with needed("nano_inference.nanochat"):
    from nano_inference.nanochat.checkpoint_manager import load_model
    from nano_inference.nanochat.engine import (
        Engine,
        KVCache,
        RowState,
        eval_with_timeout,
        sample_next_token,
        timeout,
        use_calculator,
    )
    from nano_inference.nanochat.gpt import GPT, GPTConfig
    from nano_inference.nanochat.tokenizer import RustBPETokenizer, get_tokenizer

__all__ = [
    "GPT",
    "Engine",
    "GPTConfig",
    "KVCache",
    "RowState",
    "RustBPETokenizer",
    "eval_with_timeout",
    "get_tokenizer",
    "load_model",
    "sample_next_token",
    "timeout",
    "use_calculator",
]
