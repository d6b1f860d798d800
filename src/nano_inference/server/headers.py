"""Headers of a request, as ASGI has them: pairs of bytes, in which a name may be repeated."""

from __future__ import annotations

from collections.abc import Sequence

Headers = Sequence[tuple[bytes, bytes]]


def values(headers: Headers, name: bytes) -> list[str]:
    """Return every value of a header."""
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def single(headers: Headers, name: bytes) -> str | None:
    """Return the value of a header that is there once; one that is repeated means nothing."""
    found = values(headers, name)
    return found[0] if len(found) == 1 else None
