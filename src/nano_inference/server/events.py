"""The forms of a stream: server-sent events, each with one line of JSON, or lines of JSON alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic_core import to_json


class StreamForm(NamedTuple):
    """How the values of a stream are separated."""

    media_type: str
    keep_alive: bytes  # sent after a silence, for proxies that close idle connections; empty: nothing is sent


SERVER_SENT_EVENTS = StreamForm("text/event-stream; charset=utf-8", b": keep-alive\n\n")
JSON_LINES = StreamForm("application/x-ndjson", b"")  # clients parse every line, so that a silence has no place for one

DONE = b"data: [DONE]\n\n"  # end of OpenAI's streams

_ESCAPES = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""Characters that JSON may contain, but at which Python's `str.splitlines` ends a line, and so do clients that read
lines by it (httpx's `iter_lines`, which the `ollama` package uses); and their escapes."""


def one_line(encoded: bytes) -> bytes:
    """Return JSON without the characters at which some clients split lines: inside its strings they become escapes."""
    for char, escape in _ESCAPES:
        encoded = encoded.replace(char, escape)
    return encoded


def event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + one_line(to_json(value)) + b"\n\n"


def events(values: Iterable[Any]) -> bytes:
    return b"".join(map(event, values))


def line(value: Any) -> bytes:
    return one_line(to_json(value)) + b"\n"
