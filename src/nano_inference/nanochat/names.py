"""Names in nanochat's tokenizer directory: its file, and the special tokens that begin a text and end an answer."""

from __future__ import annotations

FILE_NAME = "tokenizer.pkl"
BOS_TOKENS = ("<|bos|>", "<|endoftext|>")
"""nanochat's own, and that of OpenAI's encodings, which it can take instead."""
ASSISTANT_END = "<|assistant_end|>"
