"""Sanitizing of untrusted text (from a model or a server) before it is written to a terminal."""

from __future__ import annotations

from collections.abc import Mapping

FORCED, END_FORCED = "\ufff9", "\ufffb"
"""Markers around tool output within a rendered answer; `printable` replaces both in untrusted text."""

_REPLACEMENT = 0xFFFD
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421, 0x0D: None}
_MISLEADING = (
    *range(0x80, 0xA0),  # C1 control characters: 0x9b begins an escape sequence
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # change the direction of text
    *(0x2028, 0x2029, 0xFFF9, 0xFFFA, 0xFFFB),
    *range(0xD800, 0xE000),  # surrogates, which cannot be encoded
)
_SHOWN_AS: Mapping[int, int | None] = {**_CONTROLS, **dict.fromkeys(_MISLEADING, _REPLACEMENT)}


def printable(text: str) -> str:
    """Replace control characters, except tab and newline, by their symbols (U+241B for ESC).

    Carriage returns are removed, and bidirectional controls and surrogates become U+FFFD.
    """
    return text.translate(_SHOWN_AS)


def one_line(text: str, limit: int = 300) -> str:
    """Return a text as one printable line of at most `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
