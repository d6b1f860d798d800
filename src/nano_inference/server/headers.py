"""Reads ASGI request headers: pairs of bytes, in which a name may be repeated."""

from __future__ import annotations

from collections.abc import Sequence

Headers = Sequence[tuple[bytes, bytes]]


def values(headers: Headers, name: bytes) -> list[str]:
    """Return all values of a header."""
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def single(headers: Headers, name: bytes) -> str | None:
    """Return the value of a header; None if it is absent or repeated."""
    found = values(headers, name)
    return found[0] if len(found) == 1 else None
