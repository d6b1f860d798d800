"""Conversations in JSON files: messages, system message and sampling."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_inference.cli.conversation import Conversation, Sampling, plain_value, sampling_fields
from nano_inference.support.files import open_buffered
from nano_inference.text.chat import Message
from nano_inference.types import BadRequest, SamplingParams

_MAX_BYTES = 64 << 20
_ROLES = ("user", "assistant")
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
    data = _read(path)
    try:
        if unknown := set(data) - set(_FIELDS):
            raise BadRequest("", f"has no field {min(unknown)!r}; known: {', '.join(_FIELDS)}")
        if data.get("format", _FORMAT) != _FORMAT:
            raise BadRequest("format", f"must be {_FORMAT!r}, got {data['format']!r}")
        system = data.get("system")
        if system is not None and not isinstance(system, str):
            raise BadRequest("system", "must be a string or null")
        turns = _messages(data.get("messages"))
        sampling = _sampling(data.get("sampling", {}), conversation.first_sampling)
    except ValueError as error:
        raise BadRequest(str(path), f"{error}") from None
    return replace(conversation, system=system, turns=turns, sampling=sampling, last=None)


def _read(path: Path) -> Mapping[str, Any]:
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
    if not isinstance(data, dict):
        raise BadRequest(str(path), f"{path}: must be a JSON object with messages, got {type(data).__name__}")
    return data


def _messages(given: object) -> tuple[Message, ...]:
    """Check and return turns, alternately the user's and the assistant's."""
    if not isinstance(given, list):
        raise BadRequest("messages", "must be a list")
    for i, message in enumerate(given):
        where, wanted = f"messages[{i}]", _ROLES[i % 2]
        if not isinstance(message, dict) or message.get("role") != wanted:
            raise BadRequest(f"{where}.role", f"must be {wanted!r}: user and assistant take turns")
        if not _is_content(message.get("content")):
            raise BadRequest(f"{where}.content", "must be a string, or parts with type and text")
    if len(given) % 2:
        raise BadRequest("messages", f"must end with an answer, got {len(given)}")
    return tuple({"role": message["role"], "content": message["content"]} for message in given)


def _is_content(content: object) -> bool:
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and isinstance(part.get("text"), str)
        for part in content
    )


def _sampling(given: object, first: Sampling) -> Sampling:
    """Return the command line's sampling, overridden by that of a file."""
    if not isinstance(given, dict):
        raise BadRequest("sampling", "must be an object")
    if unknown := sorted(set(given) - set(sampling_fields())):
        raise BadRequest("", f"sampling has no field {unknown[0]!r}")
    params = SamplingParams(**{**first.params.to_dict(), **given})
    return Sampling(params, first.named | frozenset(given))


def _file_error(path: Path, error: Exception) -> BadRequest:
    return BadRequest(str(path), f"{getattr(error, 'strerror', None) or error}")
