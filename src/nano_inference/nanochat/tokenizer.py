"""`RustBPETokenizer`, `get_tokenizer` and `get_token_bytes`: the interface of nanochat's nanochat/tokenizer.py.

Based on tiktoken.Encoding, as upstream. Reads a tokenizer.pkl without unpickling it. Training imports `rustbpe`.
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
from nano_inference.nanochat.dialogue import Conversation, OutOfTurn, render_conversation, render_for_completion
from nano_inference.nanochat.files import FILE_NAME
from nano_inference.nanochat.pickled import from_encoding, nanochat_tokenizer, read_fields, token_sizes
from nano_inference.support.packages import MissingPackage
from nano_inference.text.fast import no_panic
from nano_inference.text.tiktoken_file import TiktokenTokenizer

SPECIAL_TOKENS = (  # in the order of their ids, which follow those of the merges
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
SPLIT_PATTERN = (  # splits texts into words in training: GPT-4's, with at most two digits per word
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


class RustBPETokenizer:
    """nanochat's tokenizer, with upstream's `enc` and `bos_token_id`; `text` is the same for this package's engine."""

    def __init__(self, enc: tiktoken.Encoding, bos_token: str) -> None:
        self.enc = enc
        self.bos_token_id = self.encode_special(bos_token)
        self.text: TiktokenTokenizer = from_encoding(enc, bos_token)

    @classmethod
    def from_directory(cls, tokenizer_dir: str | Path) -> RustBPETokenizer:
        """Read a directory's tokenizer.pkl. Raises `ModelError` naming the file if it is not one of nanochat's."""
        text = nanochat_tokenizer(Path(tokenizer_dir))
        return cls(text.core, text.named["bos_token"])

    @classmethod
    def from_pretrained(cls, tiktoken_name: str) -> RustBPETokenizer:
        """Return one of OpenAI's encodings, downloaded by tiktoken; it has no chat tokens."""
        return cls(tiktoken.get_encoding(tiktoken_name), "<|endoftext|>")

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int) -> RustBPETokenizer:
        """Train a tokenizer with `vocab_size` ids, including nine special tokens.

        Raises `MissingPackage` without `rustbpe`, `ValueError` if there are fewer ids than bytes.
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
        pattern = trainer.get_pattern()
        encoding = tiktoken.Encoding("rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        return cls(encoding, SPECIAL_TOKENS[0])

    def get_vocab_size(self) -> int:
        """Return the number of ids, including special ones."""
        return int(self.enc.n_vocab)

    def get_special_tokens(self) -> set[str]:
        """Return the texts of the special tokens."""
        return set(self.enc.special_tokens_set)

    def id_to_token(self, id: int) -> str:
        return self.decode([id])

    def encode_special(self, text: str) -> int:
        """Return the id of a token by its text. Raises `KeyError` for an unknown one."""
        return int(self.enc.encode_single_token(text))

    def get_bos_token_id(self) -> int:
        """Return the id of the token that starts a text."""
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
        """Return the ids of a text, or of each text of a list; special tokens in texts are encoded as plain text.

        `prepend` and `append` are ids or texts of special tokens. Raises `ValueError` for other types.
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
        """Return the text of ids, including special tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self.enc.decode(ids))

    def decode_single_token_bytes(self, id: int) -> bytes:
        """Return the bytes of one id. Raises `KeyError` for an unknown one."""
        return bytes(self.enc.decode_single_token_bytes(id))

    def save(self, tokenizer_dir: str | Path) -> None:
        """Write a tokenizer.pkl into a directory; nanochat and `from_directory` can read it."""
        directory = Path(tokenizer_dir)
        directory.mkdir(parents=True, exist_ok=True)
        # A new object, because tiktoken pickles a registered one as its name only.
        copy = tiktoken.Encoding(
            self.enc.name,
            pat_str=self.enc._pat_str,
            mergeable_ranks=self.enc._mergeable_ranks,
            special_tokens=self.enc._special_tokens,
        )
        (directory / FILE_NAME).write_bytes(pickle.dumps(copy, protocol=4))

    def render_conversation(
        self, conversation: Conversation, max_tokens: int | None = 2048
    ) -> tuple[list[int], list[int]]:
        """Return a conversation's tokens and the mask of those to train on.

        Raises `AssertionError` for messages of the wrong role, order or kind, `ValueError` for other mistakes.
        """
        with _asserting():
            return render_conversation(self.text, conversation, max_tokens)

    def render_for_completion(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation without its last message, the assistant's, then <|assistant_start|>.

        Raises as `render_conversation`.
        """
        with _asserting():
            return render_for_completion(self.text, conversation)

    def visualize_tokenization(self, ids: list[int], mask: list[int], with_token_id: bool = False) -> str:
        """Return the tokens with terminal colours: green to train on, red otherwise."""
        shown = []
        for token, is_learnt in zip(ids, mask, strict=False):
            shown.append(f"\033[{92 if is_learnt else 91}m{self.decode([token])}\033[0m")
            shown += [f"\033[90m({token})\033[0m"] if with_token_id else []
        return "|".join(shown)

    def _around(self, token: int | str | None) -> list[int]:
        if token is None:
            return []
        return [token if isinstance(token, int) else self.encode_special(token)]


def get_tokenizer(directory: str | Path | None = None) -> RustBPETokenizer:
    """Read a directory's tokenizer.pkl; default: tokenizer/ in nanochat's base directory."""
    return RustBPETokenizer.from_directory(base_path(None) / "tokenizer" if directory is None else directory)


def get_token_bytes(device: str | torch.device = "cpu", directory: str | Path | None = None) -> Tensor:
    """Return the bytes of each id, int32, 0 for special ones, to compute bits per byte.

    Computed from tokenizer.pkl, because token_bytes.pt was wrong before July 2026 for tokens with parts of characters.
    """
    named = base_path(None) / "tokenizer" if directory is None else Path(directory)
    sizes = token_sizes(read_fields(named / FILE_NAME))
    return torch.tensor(sizes, dtype=torch.int32, device=device)


@contextmanager
def _asserting() -> Iterator[None]:
    """Convert `OutOfTurn` to the `AssertionError` that nanochat raises."""
    try:
        yield
    except OutOfTurn as error:
        raise AssertionError(str(error)) from None
