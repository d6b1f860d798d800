"""`RustBPETokenizer`, `get_tokenizer` and `get_token_bytes`: the interface of nanochat's nanochat/tokenizer.py.

Over a tiktoken.Encoding, as there. A tokenizer.pkl is read without unpickling it; training needs
the package `rustbpe`, which is asked for only then.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import tiktoken
import torch
from torch import Tensor

from nano_inference.nanochat.common import base_path
from nano_inference.nanochat.names import FILE_NAME
from nano_inference.nanochat.pickled import PickledEncoding, encoding_of, read_fields, token_sizes
from nano_inference.nanochat.rendering import Conversation, OutOfTurn, render_conversation, render_for_completion
from nano_inference.nanochat.tokenizer_file import from_encoding, nanochat_tokenizer
from nano_inference.packages import MissingPackage
from nano_inference.text.fast import no_panic
from nano_inference.text.tiktoken_file import TiktokenTokenizer

SPECIAL_TOKENS = (
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
"""In the order of their ids, which follow the merges."""
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""How training cuts texts into words: GPT-4's pattern with two digits at most."""

_RED, _GREEN, _GREY, _PLAIN = "\033[91m", "\033[92m", "\033[90m", "\033[0m"


class RustBPETokenizer:
    """nanochat's tokenizer: `enc` and `bos_token_id` as there, and the same tokenizer for our own engine as `text`."""

    def __init__(self, enc: tiktoken.Encoding, bos_token: str) -> None:
        self.enc = enc
        self.bos_token_id = self.encode_special(bos_token)
        self._text = from_encoding(enc, bos_token)

    @classmethod
    def from_directory(cls, tokenizer_dir: str | Path) -> RustBPETokenizer:
        """Read a directory's tokenizer.pkl. Raises `ModelError` naming the file when it is not one of nanochat's."""
        text = nanochat_tokenizer(Path(tokenizer_dir))
        return cls(text.core, text.named["bos_token"])

    @classmethod
    def from_pretrained(cls, tiktoken_name: str) -> RustBPETokenizer:
        """Take one of OpenAI's encodings by its name; tiktoken downloads it, and it has no chat tokens."""
        return cls(tiktoken.get_encoding(tiktoken_name), "<|endoftext|>")

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int) -> RustBPETokenizer:
        """Train on texts to a vocabulary of this size, the nine special tokens included.

        Raises `MissingPackage` without `rustbpe`, `ValueError` for a size that cannot hold every byte.
        """
        merged = vocab_size - len(SPECIAL_TOKENS)
        if merged < 256:
            raise ValueError(f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)}, got {vocab_size}")
        try:
            rustbpe = importlib.import_module("rustbpe")
        except ImportError:
            raise MissingPackage("training a tokenizer needs the package rustbpe: pip install rustbpe") from None
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(text_iterator), merged, pattern=SPLIT_PATTERN)
        ranks = {bytes(word): rank for word, rank in trainer.get_mergeable_ranks()}
        special = {text: len(ranks) + index for index, text in enumerate(SPECIAL_TOKENS)}
        fields = PickledEncoding(
            name="rustbpe", pat_str=trainer.get_pattern(), mergeable_ranks=ranks, special_tokens=special
        )
        return cls(encoding_of(fields), SPECIAL_TOKENS[0])

    @property
    def text(self) -> TiktokenTokenizer:
        """The same tokenizer as the rest of this package knows one."""
        return self._text

    def get_vocab_size(self) -> int:
        """Return the number of ids, the special ones included."""
        size: int = self.enc.n_vocab
        return size

    def get_special_tokens(self) -> set[str]:
        """Return the texts of the special tokens."""
        texts: set[str] = self.enc.special_tokens_set
        return texts

    def id_to_token(self, id: int) -> str:
        """Return the text of one id."""
        return self.decode([id])

    def encode_special(self, text: str) -> int:
        """Return the id of exactly this token. Raises `KeyError` when there is none."""
        token: int = self.enc.encode_single_token(text)
        return token

    def get_bos_token_id(self) -> int:
        """Return the token before every text."""
        return self.bos_token_id

    @overload
    def encode(
        self, text: str, prepend: int | str | None = None, append: int | str | None = None, num_threads: int = 8
    ) -> list[int]: ...

    @overload
    def encode(
        self, text: list[str], prepend: int | str | None = None, append: int | str | None = None, num_threads: int = 8
    ) -> list[list[int]]: ...

    def encode(
        self,
        text: str | list[str],
        prepend: int | str | None = None,
        append: int | str | None = None,
        num_threads: int = 8,
    ) -> list[int] | list[list[int]]:
        """Return the ids of a text or of each of a list; no text ever becomes a special token.

        `prepend` and `append` are ids or the texts of special tokens. Raises `ValueError` for anything but text.
        """
        before, after = self._around(prepend), self._around(append)
        if isinstance(text, str):
            return [*before, *self.text.encode(text, add_special=False, parse_special=False), *after]
        if isinstance(text, list) and all(isinstance(part, str) for part in text):
            with no_panic("a text"):
                rows = self.enc.encode_ordinary_batch(text, num_threads=num_threads)
            return [[*before, *row, *after] for row in rows]
        raise ValueError(f"text must be a string or a list of strings, got {type(text).__name__}")

    __call__ = encode

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens as their literal text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self.enc.decode(ids)
        return text

    def decode_single_token_bytes(self, id: int) -> bytes:
        """Return the bytes of one id. Raises `KeyError` for an unknown one."""
        data: bytes = self.enc.decode_single_token_bytes(id)
        return data

    def save(self, tokenizer_dir: str | Path) -> None:
        """Write a tokenizer.pkl into a directory, for nanochat itself and for `from_directory`."""
        directory = Path(tokenizer_dir)
        directory.mkdir(parents=True, exist_ok=True)
        fields = PickledEncoding(
            name=self.enc.name,
            pat_str=self.enc._pat_str,
            mergeable_ranks=self.enc._mergeable_ranks,
            special_tokens=self.enc._special_tokens,
        )
        # A new object: tiktoken pickles one that it has in its registry as its mere name.
        (directory / FILE_NAME).write_bytes(pickle.dumps(encoding_of(fields), protocol=4))

    def render_conversation(
        self, conversation: Conversation, max_tokens: int | None = 2048
    ) -> tuple[list[int], list[int]]:
        """Return a conversation's tokens and the mask of those to learn.

        Raises `AssertionError` for messages of the wrong role, order or kind, `ValueError` for other mistakes.
        """
        with _asserting():
            return render_conversation(self._text, conversation, max_tokens)

    def render_for_completion(self, conversation: Conversation) -> list[int]:
        """Return the tokens before the last message, the assistant's, with <|assistant_start|>.

        Raises as `render_conversation`.
        """
        with _asserting():
            return render_for_completion(self._text, conversation)

    def visualize_tokenization(self, ids: list[int], mask: list[int], with_token_id: bool = False) -> str:
        """Return the tokens in a terminal's colours, those to learn green and the others red."""
        shown = []
        for token, is_learnt in zip(ids, mask, strict=False):
            text = f"{_GREEN if is_learnt else _RED}{self.decode([token])}{_PLAIN}"
            shown.append(f"{text}{_GREY}({token}){_PLAIN}" if with_token_id else text)
        return "|".join(shown)

    def _around(self, token: int | str | None) -> list[int]:
        if token is None:
            return []
        return [token if isinstance(token, int) else self.encode_special(token)]


def get_tokenizer(directory: str | Path | None = None) -> RustBPETokenizer:
    """Read a directory's tokenizer.pkl, by default that of nanochat's base directory."""
    return RustBPETokenizer.from_directory(_directory(directory))


def _directory(named: str | Path | None) -> Path:
    return base_path(None) / "tokenizer" if named is None else Path(named)


def get_token_bytes(device: str | torch.device = "cpu", directory: str | Path | None = None) -> Tensor:
    """Return how many bytes each id writes, int32, 0 for the special ones: what bits per byte are counted with.

    Counted from tokenizer.pkl; the token_bytes.pt of trainings before July 2026 is wrong for tokens that are parts of
    characters.
    """
    sizes = token_sizes(read_fields(_directory(directory) / FILE_NAME))
    return torch.tensor(sizes, dtype=torch.int32, device=device)


@contextmanager
def _asserting() -> Iterator[None]:
    """Raise what nanochat raises where it asserts."""
    try:
        yield
    except OutOfTurn as error:
        raise AssertionError(str(error)) from None
