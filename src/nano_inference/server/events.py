"""Server-sent events as bytes, each with one line of JSON; some dialects name their events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import to_json

DONE = b"data: [DONE]\n\n"
"""End of OpenAI's streams."""


def event(value: Any, name: str | None = None) -> bytes:
    """Return one event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


def events(values: Iterable[Any]) -> bytes:
    """Return unnamed events."""
    return b"".join(map(event, values))
