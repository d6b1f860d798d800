"""An incremental JSON parser that finds where a value ends or becomes invalid (RFC 8259).

The functions are pure. A step consumes one punctuation character, one run of whitespace, or the available part of a
string or number. The state's size is bounded, and the result does not depend on how the text was split.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_DEPTH: Final = 64
MAX_SCALAR: Final = 64  # limit on the characters of a number
SPACE: Final = " \t\r\n"

_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALARS = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


class JsonState(NamedTuple):
    """State of parsing one value."""

    nest: str = ""  # the open brackets
    due: str = "value"
    """The expected element: value, item (or ]), key, first (key or }), colon, next (comma or bracket), done."""
    token: str = ""
    """In a string: its quote, a backslash, or one "u" for each missing hex digit. In a scalar: its text so far."""

    @property
    def is_in_string(self) -> bool:
        """True if the next character belongs to a string."""
        return self.token[:1] in ('"', "\\", "u")

    @property
    def is_key(self) -> bool:
        """True if the current or expected string is a key."""
        return self.due in ("key", "first")


def step(state: JsonState, text: str, at: int, end: int) -> tuple[JsonState, int] | None:
    """Consume characters of `text` from `at`, before `end`; return the new state and the index after them.

    None if the character at `at` is invalid. The end of a number consumes no character. Unescaped control characters
    are accepted in strings, contrary to JSON, because models write them.
    """
    nest, due, token = state
    char, after_value = text[at], JsonState(nest, "next" if nest else "done")
    after: JsonState | None = None
    if token == '"':
        if char not in '"\\':
            found = _PLAIN.match(text, at, end)
            return state, end if found is None else found.end()
        after = (
            JsonState(nest, due, char) if char == "\\" else JsonState(nest, "colon") if state.is_key else after_value
        )
    elif token == "\\":
        after = JsonState(nest, due, "uuuu" if char == "u" else '"') if char in '"\\/bfnrtu' else None
    elif state.is_in_string:  # within \uXXXX
        after = JsonState(nest, due, token[1:] or '"') if char in "0123456789abcdefABCDEF" else None
    elif token:  # in a number or a word
        found = _SCALAR.match(text, at, min(end, at + MAX_SCALAR - len(token)))
        if found is not None:
            return JsonState(nest, due, token + found.group()), found.end()
        is_whole = not _SCALAR.match(text, at, end) and _SCALARS.fullmatch(token)
        return (after_value, at) if is_whole else None
    elif char in SPACE:
        found = _SPACES.match(text, at, end)
        return state, end if found is None else found.end()
    elif char == '"' and due in ("value", "item", "key", "first"):
        after = JsonState(nest, due, char)
    elif char in "{[" and due in ("value", "item") and len(nest) < MAX_DEPTH:
        after = JsonState(nest + char, "first" if char == "{" else "item")
    elif due in ("first", "item", "next") and nest[-1:] + char in ("{}", "[]"):
        after = JsonState(nest[:-1], "next" if nest[:-1] else "done")
    elif char == ":" and due == "colon":
        after = JsonState(nest, "value")
    elif char == "," and due == "next":
        after = JsonState(nest, "key" if nest[-1] == "{" else "value")
    elif char in "-0123456789tfn" and due in ("value", "item"):
        after = JsonState(nest, due, char)
    return None if after is None else (after, at + 1)


def as_object(text: str) -> str | None:
    """Return a text that is one JSON object, with the control characters in its strings escaped; None for any other."""
    state, at = JsonState(), 0
    pieces = []
    while at < len(text):
        found = step(state, text, at, len(text))
        if found is None or not (found[0].nest or found[0].due == "done" or text[at] in SPACE):
            return None
        piece = text[at : found[1]]
        pieces.append(escape_control(piece) if state.token == '"' else piece)
        state, at = found
    return "".join(pieces) if state.due == "done" and text.strip(SPACE).startswith("{") else None


def escape_control(text: str) -> str:
    """Return the content of a JSON string with its control characters escaped."""
    return _CONTROL.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04x}"), text)
