"""Names of nanochat's tokenizer file and of the special tokens that start a text and end an answer."""

from __future__ import annotations

FILE_NAME = "tokenizer.pkl"
BOS_TOKENS = ("<|bos|>", "<|endoftext|>")
"""nanochat's own, and that of OpenAI's encodings."""
ASSISTANT_END = "<|assistant_end|>"
