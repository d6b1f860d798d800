"""Conversations in JSON files: messages, system message and sampling."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_inference.cli.conversation import Conversation, Sampling, plain_value, sampling_fields
from nano_inference.support.files import open_buffered
from nano_inference.text.chat import Message
from nano_inference.types import BadRequest, SamplingParams

_MAX_BYTES = 64 << 20
_FIELDS = ("format", "model", "system", "messages", "sampling")
_FORMAT = "nano-inference chat 1"


def save(path: Path, conversation: Conversation, model: str, *, overwrite: bool) -> None:
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
        raise _file_error(path, error) from None


def load(path: Path, conversation: Conversation) -> Conversation:
    """Return `conversation` with the conversation of a file. Raises `BadRequest` naming the file and the field."""
    try:
        with open_buffered(path) as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _file_error(path, error) from None
    if len(text) > _MAX_BYTES:
        raise BadRequest(str(path), f"has more than {_MAX_BYTES >> 20} MiB")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(str(path), "is not JSON") from None
    try:
        return _conversation(data, conversation)
    except ValueError as error:
        raise BadRequest(str(path), f"{path}: {error}") from None


def _conversation(data: Any, before: Conversation) -> Conversation:
    """Return a file's conversation, with the command line's sampling overridden by the file's."""
    if not isinstance(data, dict):
        raise BadRequest("", f"must be a JSON object with messages, got {type(data).__name__}")
    if unknown := set(data) - set(_FIELDS):
        raise BadRequest("", f"has no field {min(unknown)!r}; known: {', '.join(_FIELDS)}")
    if data.get("format", _FORMAT) != _FORMAT:
        raise BadRequest("format", f"must be {_FORMAT!r}, got {data['format']!r}")
    if not isinstance(data.get("system"), str | None):
        raise BadRequest("system", "must be a string or null")
    turns = data.get("messages")
    if not isinstance(turns, list):
        raise BadRequest("messages", "must be a list")
    for i, turn in enumerate(turns):
        where, role = f"messages[{i}]", ("user", "assistant")[i % 2]
        if not isinstance(turn, dict) or turn.get("role") != role:
            raise BadRequest(f"{where}.role", f"must be {role!r}: user and assistant take turns")
        content = turn.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if not all(isinstance(part, dict) and _is_text(part.get("type"), part.get("text")) for part in parts):
            raise BadRequest(f"{where}.content", "must be a string, or parts with type and text")
    if len(turns) % 2:
        raise BadRequest("messages", f"must end with an answer, got {len(turns)}")
    given, first = data.get("sampling", {}), before.first_sampling
    if not isinstance(given, dict):
        raise BadRequest("sampling", "must be an object")
    if unknown := set(given) - set(sampling_fields()):
        raise BadRequest("", f"sampling has no field {min(unknown)!r}")
    params = SamplingParams(**{**first.params.to_dict(), **given})
    messages: tuple[Message, ...] = tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)
    sampling = Sampling(params, first.named | frozenset(given))
    return replace(before, system=data.get("system"), turns=messages, sampling=sampling, last=None)


def _is_text(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _file_error(path: Path, error: Exception) -> BadRequest:
    return BadRequest(str(path), f"{getattr(error, 'strerror', None) or error}")
