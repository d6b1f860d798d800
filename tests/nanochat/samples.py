"""A small nanochat tokenizer: a few merges and the nine special tokens, pickled as by nanochat."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path

import tiktoken

from nano_inference.nanochat.pickled import from_encoding
from nano_inference.text.tiktoken_file import TiktokenTokenizer
from tests.nanochat.tiny import PATTERN, SPECIALS

WORDS = ["he", "hel", "hell", "hello", " w", "12", "<|", "|>", "é", "日本", "  ", "\n\n", "co", "cou", "coun", "count"]
RANKS: tuple[bytes, ...] = (*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS))
SPECIAL = tuple(f"<|{name}|>" for name in SPECIALS)


def encoding() -> tiktoken.Encoding:
    """Return a new encoding with 256 bytes, some merges and nanochat's special tokens."""
    ranks = {word: rank for rank, word in enumerate(RANKS)}
    special = {text: len(ranks) + index for index, text in enumerate(SPECIAL)}
    return tiktoken.Encoding("rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@cache
def tokenizer() -> TiktokenTokenizer:
    """Return the tokenizer of `encoding()`."""
    return from_encoding(encoding(), "<|bos|>")


def write_pickle(directory: Path, content: object, protocol: int = 4) -> Path:
    """Write a tokenizer.pkl as nanochat does."""
    path = directory / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path
