"""JSON read as it comes, as pure steps: enough of RFC 8259 to know where a value ends and where it goes wrong.

A step takes one mark, one run of space, or as much of a string or a number as is there. Its state is small whatever
was read, and where the text was cut makes no difference to what the steps together took.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_DEPTH: Final = 64
MAX_SCALAR: Final = 64
"""Characters of a number."""
SPACE: Final = " \t\r\n"

_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALARS = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_BARE = re.compile(r"[\x00-\x1f]")
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


class JsonState(NamedTuple):
    """Where the reading of one value stands."""

    nest: str = ""
    """The brackets that are open."""
    due: str = "value"
    """What comes next: value, item (or ]), key, first (key or }), colon, next (comma or bracket), done."""
    token: str = ""
    """Inside a string its quote, a backslash or u and the digits that it still needs; a number's text so far."""

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self.token[:1] in ('"', "\\", "u")

    @property
    def is_key(self) -> bool:
        """Whether the string that is read, or that is due, is a key."""
        return self.due in ("key", "first")


def step(state: JsonState, text: str, at: int, end: int) -> tuple[JsonState, int] | None:
    """Take characters of `text` from `at`, before `end`; return the state and the place behind them.

    None when the character at `at` cannot stand there. The end of a number takes no character: the one behind it is
    for the next step. Raw control characters are let through in strings, where JSON has none but models write them.
    """
    if state.is_in_string:
        return _in_string(state, text, at, end)
    if state.token:
        return _in_scalar(state, text, at, end)
    char = text[at]
    if char in SPACE:
        found = _SPACES.match(text, at, end)
        return state, end if found is None else found.end()
    after = _after_mark(state, char)
    return None if after is None else (after, at + 1)


def is_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    state, at = JsonState(), 0
    while at < len(text):
        found = step(state, text, at, len(text))
        if found is None or not (found[0].nest or found[0].due == "done" or text[at] in SPACE):
            return False
        state, at = found
    return state.due == "done" and text.strip(SPACE).startswith("{")


def without_bare(text: str) -> str:
    """Return a string's inside with its raw control characters escaped."""
    return _BARE.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def _after_mark(state: JsonState, char: str) -> JsonState | None:
    """Return the state behind a character outside of strings and numbers; None when it cannot stand there."""
    nest, due, _ = state
    if char == '"' and due in ("value", "item", "key", "first"):
        return JsonState(nest, due, char)
    if char in "{[" and due in ("value", "item") and len(nest) < MAX_DEPTH:
        return JsonState(nest + char, "first" if char == "{" else "item")
    if due in ("first", "item", "next") and nest[-1:] + char in ("{}", "[]"):
        return _behind_value(nest[:-1])
    if char == ":" and due == "colon":
        return JsonState(nest, "value")
    if char == "," and due == "next":
        return JsonState(nest, "key" if nest[-1] == "{" else "value")
    if char in "-0123456789tfn" and due in ("value", "item"):
        return JsonState(nest, due, char)
    return None


def _behind_value(nest: str) -> JsonState:
    return JsonState(nest, "next" if nest else "done")


def _in_string(state: JsonState, text: str, at: int, end: int) -> tuple[JsonState, int] | None:
    nest, due, token = state
    char = text[at]
    if token == '"':
        if char == '"':
            return JsonState(nest, "colon") if state.is_key else _behind_value(nest), at + 1
        if char == "\\":
            return JsonState(nest, due, char), at + 1
        found = _PLAIN.match(text, at, end)
        return state, end if found is None else found.end()
    if token == "\\":
        after = "uuuu" if char == "u" else '"'
        return (JsonState(nest, due, after), at + 1) if char in '"\\/bfnrtu' else None
    return (JsonState(nest, due, token[1:] or '"'), at + 1) if char in "0123456789abcdefABCDEF" else None


def _in_scalar(state: JsonState, text: str, at: int, end: int) -> tuple[JsonState, int] | None:
    nest, due, token = state
    found = _SCALAR.match(text, at, min(end, at + MAX_SCALAR - len(token)))
    if found is not None:
        return JsonState(nest, due, token + found.group()), found.end()
    if _SCALAR.match(text, at, end) or not _SCALARS.fullmatch(token):
        return None
    return _behind_value(nest), at
