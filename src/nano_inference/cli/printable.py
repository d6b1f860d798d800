"""What may reach a terminal of a text that somebody else wrote: a model, a server."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FORCED, END_FORCED = "\ufff9", "\ufffb"
"""Stand around text that a tool forced into an answer, on its way to the screen. `printable` leaves neither in."""

_NO_SIGN = 0xFFFD
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421, 0x0D: None}
_MISLEADING = (
    *range(0x80, 0xA0),  # further control characters: 0x9b begins an escape sequence as ESC [ does
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # turn the order of what follows
    *(0x2028, 0x2029, 0xFFF9, 0xFFFA, 0xFFFB),
    *range(0xD800, 0xE000),  # halves of a character, which no encoding can write
)
_SHOWN_AS: Mapping[int, int | None] = MappingProxyType({**_CONTROLS, **dict.fromkeys(_MISLEADING, _NO_SIGN)})


def printable(text: str) -> str:
    """Return a text whose control characters are pictures of themselves (U+241B for ESC); tabs and newlines stay.

    A carriage return goes: before a newline it says nothing, elsewhere it would overwrite the line.
    """
    return text.translate(_SHOWN_AS)


def one_line(text: str, limit: int = 300) -> str:
    """Return a text as one printable line of at most `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
