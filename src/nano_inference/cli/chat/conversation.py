"""Records of a chat, the protocol of its backends, and conversations in JSON files: messages, system message, sampling.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nano_inference.cli.sampling import AnswerStats, Sampling, plain_value, sampling_fields
from nano_inference.cli.terminal import Interrupts, note
from nano_inference.loading.fields import Fields, read_json
from nano_inference.text.chat import Message
from nano_inference.types import BadRequest, FinishReason, ModelError, SamplingParams

NUM_ALTERNATIVES = 5  # number of the most likely tokens that /tokens shows per position
DROPPED = "[the conversation is too long for the model: its oldest {} messages were dropped]"
_RESERVE = 512  # tokens reserved for an answer; at most a quarter of the context


class ServerError(RuntimeError):
    """A server cannot be reached, rejects a request or sends an invalid reply. One printable line."""


class Piece(NamedTuple):
    """A piece of an answer's text."""

    text: str
    is_forced: bool = False  # True for a tool's output


Write = Callable[[Sequence[Piece]], None]


class ShownToken(NamedTuple):
    """A token of an answer for display."""

    text: str
    logprob: float | None  # natural logarithm of its probability
    is_forced: bool = False
    top: tuple[tuple[str, float], ...] = ()
    """The most likely tokens at its position with their log-probabilities, in descending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for an answer."""

    turns: tuple[Message, ...]  # the last turn is the user's
    system: str | None = None
    sampling: Sampling = Sampling()
    has_tokens: bool = False  # also return the tokens' probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, possibly incomplete."""

    message: Message  # the assistant's turn
    kept: tuple[Message, ...]  # the turns in the prompt: all, or the latest ones that fit in the context
    finish_reason: FinishReason | str | None
    stats: AnswerStats
    tokens: tuple[ShownToken, ...] = ()
    cut_by: str | None = None  # length limit that ended it, if known
    failure: str | None = None  # reason of a failure during the answer: one printable line


class ChatBackend(Protocol):
    """Generates answers: an engine in this process, or a server."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts that /model prints; at least `model`, `context` and `backend`."""

    def count(self, turns: tuple[Message, ...], system: str | None) -> int | None:
        """Return the number of tokens of a conversation; None if unknown."""

    def switch(self, model: str) -> Mapping[str, Any]:
        """Answer with another model from now on; return its default sampling fields.

        Raises `BadRequest` if there is no such choice, and `ServerError`.
        """

    def answer(self, question: Question, interrupts: Interrupts, write: Write) -> Reply:
        """Answer and stream the text to `write`; Ctrl-C (`interrupts`) ends the answer early.

        Raises `BadRequest` for invalid requests, and `ServerError` if no text arrived.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """State of a chat."""

    sampling: Sampling
    first_sampling: Sampling  # restored by `/set NAME default`
    system: str | None = None
    turns: tuple[Message, ...] = ()
    shows_tokens: bool = False
    last: Reply | None = None
    is_over: bool = False
    has_failed: bool = False  # True if the server failed during the last answer
    has_bare_words: bool = False  # True if "quit", "exit" and "clear" are commands without a slash


def fit_turns(
    turns: tuple[Message, ...], max_tokens: int | None, context: int, count: Callable[[tuple[Message, ...]], float]
) -> tuple[Message, ...]:
    """Return the latest turns that leave room for an answer, and print how many were dropped.

    `count` returns the tokens of a prompt; its last call is for the returned turns. The last turn always remains.
    """
    reserve = _RESERVE if max_tokens is None else min(max_tokens, _RESERVE)
    room = context - min(reserve, context // 4)
    kept, size = turns, count(turns)
    if size > room:
        # Drop more than necessary, so that the next turns share this prompt's cached prefix.
        while size > room * 3 // 4 and len(kept) > 2:
            kept = kept[2:]
            size = count(kept)
    if len(kept) < len(turns):
        note(DROPPED.format(len(turns) - len(kept)))
    return kept


_FIELDS = ("format", "model", "system", "messages", "sampling")
_FORMAT = "nano-inference chat 1"


def save_conversation(path: Path, conversation: Conversation, model: str, *, overwrite: bool) -> None:
    """Write a conversation to a file with mode 0600.

    Raises `BadRequest` if the file cannot be written, or exists and `overwrite` is false.
    """
    data = {
        "format": _FORMAT,
        "model": model,
        "system": conversation.system,
        "messages": list(conversation.turns),
        "sampling": {
            name: plain_value(conversation.sampling.params, name) for name in sorted(conversation.sampling.named)
        },
    }
    text = json.dumps(data, indent=2) + "\n"
    how = os.O_TRUNC if overwrite else os.O_EXCL
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadRequest(str(path), "already exists; /save! overwrites it") from None
    except (OSError, ValueError) as error:
        raise BadRequest(str(path), f"{getattr(error, 'strerror', None) or error}") from None


def load_conversation(path: Path, conversation: Conversation) -> Conversation:
    """Return `conversation` with the conversation of a file. Raises `BadRequest` naming the file and the field."""
    try:
        return _conversation(read_json(path), conversation)
    except ModelError as error:  # begins with the path
        raise BadRequest(str(path), str(error)) from None
    except ValueError as error:
        raise BadRequest(str(path), f"{path}: {error}") from None


def _conversation(data: Fields, before: Conversation) -> Conversation:
    """Return a file's conversation, with the command line's sampling overridden by the file's."""
    if unknown := set(data.values) - set(_FIELDS):
        raise BadRequest("", f"has no field {min(unknown)!r}; known: {', '.join(_FIELDS)}")
    if data.text("format", _FORMAT) != _FORMAT:
        raise data.bad("format", repr(_FORMAT))
    turns = data.sequence("messages")
    if turns is None:
        raise data.bad("messages", "a list")
    for i, turn in enumerate(turns):
        where, role = f"messages[{i}]", ("user", "assistant")[i % 2]
        if not isinstance(turn, dict) or turn.get("role") != role:
            raise BadRequest(f"{where}.role", f"must be {role!r}: user and assistant take turns")
        content = turn.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if not all(
            isinstance(part, dict) and isinstance(part.get("type"), str) and isinstance(part.get("text"), str)
            for part in parts
        ):
            raise BadRequest(f"{where}.content", "must be a string, or parts with type and text")
    if len(turns) % 2:
        raise BadRequest("messages", f"must end with an answer, got {len(turns)}")
    given, first = data.mapping("sampling"), before.first_sampling
    if unknown := set(given) - set(sampling_fields()):
        raise BadRequest("", f"sampling has no field {min(unknown)!r}")
    params = SamplingParams(**{**first.params.to_dict(), **given})
    messages: tuple[Message, ...] = tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)
    sampling = Sampling(params, first.named | frozenset(given))
    return replace(before, system=data.text("system", "") or None, turns=messages, sampling=sampling, last=None)
