"""What a tokenizer can do, and the door through which one is loaded.

Four sources: a directory with Hugging Face's tokenizer.json, with nanochat's tokenizer.pkl (read, never unpickled) or
with tiktoken's ranks, a GGUF file's metadata. What would run code (other pickles, Python files) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from nano_inference.files import is_present, path_of
from nano_inference.packages import needed
from nano_inference.text.gguf_vocab import gguf_tokenizer
from nano_inference.text.hf import hf_tokenizer
from nano_inference.text.nanochat_names import FILE_NAME
from nano_inference.text.tiktoken_ranks import find_ranks
from nano_inference.types import ModelError, TokenizerSource


class Tokenizer(Protocol):
    """Text to ids and back, shared by all threads: nothing in it changes after it is built."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None:
        """The token before every text, for models that have one."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, the tokenizer's own first."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""

    @property
    def drops_space(self) -> bool:
        """Whether a text that begins here loses one leading space when decoded (SentencePiece)."""

    @property
    def named(self) -> Mapping[str, str]:
        """The special tokens that have a role: `bos_token`, `eos_token`, … to their text."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids; `parse_special=False` spells out special tokens that stand in the text."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that an id writes."""

    def token_text(self, token: int) -> str:
        """Return an id's piece as the vocabulary spells it."""


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Load the tokenizer that a source describes. Raises `ModelError` naming the file that cannot be used.

    tokenizer.pkl and tiktoken's files raise `MissingPackage`, a `ModelError`, without tiktoken.
    """
    if source.gguf is not None:
        return gguf_tokenizer(source.gguf, source.path)
    directory = path_of(source.path, "tokenizer")
    if not directory.is_dir():
        raise ModelError(f"{source.path}: no such directory")
    if is_present(directory / FILE_NAME):  # before a tokenizer.json beside it, as nanochat itself does
        with needed(f"{directory / FILE_NAME}: nanochat's tokenizer"):
            from nano_inference.text.nanochat_file import nanochat_tokenizer
        return nanochat_tokenizer(directory)
    if is_present(directory / "tokenizer.json"):
        return hf_tokenizer(directory)
    ranks = find_ranks(directory)
    if ranks is not None:
        with needed(f"{ranks}: tiktoken's file"):
            from nano_inference.text.tiktoken_file import tiktoken_tokenizer
        return tiktoken_tokenizer(directory, ranks)
    raise ModelError(_why_none(directory))


def _why_none(directory: Path) -> str:
    """Say what lies in a directory instead of a tokenizer that can be used."""
    if (directory / "tokenizer.model").is_file():
        return (
            f"{directory / 'tokenizer.model'}: a SentencePiece model alone cannot be read; convert it once with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes tokenizer.json"
        )
    for pattern, what in (("*.pkl", "a pickle"), ("*.pickle", "a pickle"), ("tokenization_*.py", "Python code")):
        found = sorted(directory.glob(pattern))
        if found:
            return f"{found[0]}: {what} is not run to get a tokenizer; convert it to tokenizer.json"
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return (
            f"{directory / 'vocab.json'}: a vocabulary without its pre-tokenizer is ambiguous; "
            "save the tokenizer as tokenizer.json with transformers"
        )
    return f"{directory}: no tokenizer: neither tokenizer.json, nanochat's tokenizer.pkl nor a tiktoken file"
