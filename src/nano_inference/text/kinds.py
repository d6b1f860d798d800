"""What a tokenizer and a dialogue can do, and the row by which a package adds a kind of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from nano_inference.types import TokenProgram

TOKENIZERS_GROUP = "nano_inference.tokenizers"
"""The group of entry points by which a package adds a kind of tokenizer."""

Message = Mapping[str, Any]
"""A message of a conversation: "role", "content" and further fields that a template reads."""


class TokenizerSource(NamedTuple):
    """Where a tokenizer's files lie: a Hugging Face directory, or the metadata of a GGUF file."""

    path: str
    gguf: Mapping[str, Any] | None = None
    """The GGUF file's metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`); None for a directory."""


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


class Tool(TokenProgram, Protocol):
    """A token program whose calls and results are between special tokens."""

    @property
    def call(self) -> tuple[int, int]:
        """The tokens that begin and end a call, which the model samples."""

    @property
    def result(self) -> tuple[int, int]:
        """The tokens that begin and end the result that is forced after a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How messages are put before the model."""

    add_generation_prompt: bool = True
    """End with the beginning of the answer."""
    continue_final: bool = False
    """End inside the last message, which the model continues."""
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further variables of the chat template."""


ANSWER = Rendering()
"""The usual way: the model is to answer."""


class Dialogue(Protocol):
    """A way of talking with one model."""

    @property
    def tool(self) -> Tool | None:
        """What the model may call while it writes."""

    @property
    def tool_template(self) -> str | None:
        """The source of the template that describes functions to the model; None without one."""

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the ids that the model reads before it answers. Raises `BadRequest` naming the wrong message."""

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return what `encode` encodes, as text. Raises as it does."""

    def knows(self, name: str) -> bool:
        """Whether a variable of that name in `Rendering.extra` could change anything."""

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the message that the model's tokens make, for the next turn; `text` is what was shown of it."""

    def close(self) -> None:
        """End the processes that render, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKind:
    """One kind of tokenizer directory: a row of the table that `tokenizer.installed_tokenizers` returns."""

    title: str
    """What its file is called in messages: "tokenizer.json"."""
    description: str
    """What `models info` prints of a model with such a tokenizer."""
    reads: Callable[[Path], bool]
    """True for a directory that has the files."""
    load: Callable[[Path], Tokenizer]
    """Load the tokenizer of such a directory. Raises `ModelError` naming the file that cannot be used."""
    find: Callable[[Path], TokenizerSource | None] = lambda path: None
    """The tokenizer of a model without config.json, from the model's path; None for a model of another kind."""
    dialogue: Callable[[Tokenizer], Dialogue | None] = lambda tokenizer: None
    """How models with such special tokens are talked with, whatever the files; None for others."""
