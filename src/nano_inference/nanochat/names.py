"""Names of nanochat's tokenizer file and of special tokens, and the errors of missing ones in upstream's classes."""

from __future__ import annotations

from nano_inference.types import ModelError

FILE_NAME = "tokenizer.pkl"
BOS_TOKENS = ("<|bos|>", "<|endoftext|>")  # nanochat's own, and that of OpenAI's encodings
ASSISTANT_END = "<|assistant_end|>"


class UnknownName(ModelError, KeyError):
    """A source of checkpoints or a special token does not exist."""

    __str__ = Exception.__str__  # KeyError's quotes the message
