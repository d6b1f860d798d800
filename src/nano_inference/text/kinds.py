"""Protocols of tokenizers and dialogues, and the table row by which a package adds a kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from nano_inference.types import TokenProgram

TOKENIZERS_GROUP = "nano_inference.tokenizers"  # the entry-point group by which a package adds a kind of tokenizer

Message = Mapping[str, Any]  # a message of a conversation: "role", "content" and further fields for the template


class TokenizerSource(NamedTuple):
    """The source of a tokenizer: a directory, or the metadata of a GGUF file."""

    path: str
    gguf: Mapping[str, Any] | None = None
    """The GGUF file's metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`); None for a directory."""


class Tokenizer(Protocol):
    """Encodes text and decodes token ids; immutable, so all threads share one."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None:
        """The id of the BOS token, None without one."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end tokens: `eos_token` first, then those of generation_config.json or the GGUF file."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` skips by default."""

    @property
    def drops_space(self) -> bool:
        """True if decoding removes one leading space (SentencePiece)."""

    @property
    def named(self) -> Mapping[str, str]:
        """Maps roles (`bos_token`, `eos_token`, …) to the special tokens' texts."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids; with `parse_special=False` the text of a special token is encoded as plain text."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text; invalid UTF-8 becomes U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of an id."""

    def token_text(self, token: int) -> str:
        """Return an id's piece as spelled in the vocabulary."""


class Tool(TokenProgram, Protocol):
    """A token program that delimits calls and results by special tokens."""

    @property
    def call(self) -> tuple[int, int]:
        """The tokens that start and end a call, which the model samples."""

    @property
    def result(self) -> tuple[int, int]:
        """The tokens that start and end a result, which is forced after a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Options for rendering messages to a prompt."""

    add_generation_prompt: bool = True  # end with the header of the assistant's turn
    continue_final: bool = False  # end after the last message's content, so that the model continues it
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # further template variables


ANSWER = Rendering()  # the default: prompt the model for an answer


class Dialogue(Protocol):
    """Converts between messages and the tokens of one model."""

    @property
    def tool(self) -> Tool | None:
        """The built-in tool that the model can call while it generates."""

    @property
    def tool_template(self) -> str | None:
        """The source of the template that describes functions to the model; None without one."""

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the prompt's token ids. Raises `BadRequest` naming the wrong message."""

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return the prompt as text. Raises as `encode` does."""

    def knows(self, name: str) -> bool:
        """Return True if a variable of that name in `Rendering.extra` could affect the prompt."""

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the assistant's message, for the next turn, from its tokens and its displayed text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKind:
    """A kind of tokenizer directory: a row of the table that `tokenizer.installed_tokenizers` returns."""

    title: str  # the file's name in error messages: "tokenizer.json"
    description: str  # the tokenizer's kind in the output of `models info`
    reads: Callable[[Path], bool]  # returns True for a directory that contains this kind's files
    load: Callable[[Path], Tokenizer]
    """Loads the tokenizer of such a directory. Raises `ModelError` naming the unusable file."""
    find: Callable[[Path], TokenizerSource | None] = lambda path: None
    """Returns the tokenizer source of a model without config.json, from the model's path; None for other models."""
    dialogue: Callable[[Tokenizer], Dialogue | None] = lambda tokenizer: None
    """Returns the dialogue of models with this kind's special tokens; None for other tokenizers."""
