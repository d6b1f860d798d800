"""Tokens to safe text, as pure steps: text leaves only when no later token can change it.

Held back are the first bytes of a character that is not whole yet and every ending that begins a stop string. The
state is a frozen value that the caller keeps; nothing here knows a tokenizer, pieces are the bytes of tokens.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """What one stream of text holds back."""

    stops: tuple[str, ...] = ()
    pending: bytes = b""
    """The first bytes of a character that is not whole yet: three at most."""
    held: str = ""
    """The longest ending of the text so far that begins a stop string."""
    drop_space: bool = False
    """The next character is dropped when it is a space: SentencePiece writes one before the first word."""
    stopped: str | None = None
    """The stop string that was written; nothing comes after it."""


def start(*, stops: tuple[str, ...] = (), drop_space: bool = False) -> StreamState:
    """Return the state before the first token. `drop_space`: a text that begins here, in a tokenizer with that rule.

    An empty stop string would end every text before its first character: `ValueError`.
    """
    if "" in stops:
        raise ValueError("stop must not hold an empty string")
    return StreamState(stops=stops, drop_space=drop_space)


def push(state: StreamState, piece: bytes) -> tuple[StreamState, str]:
    """Take the bytes of the next token; return the new state and the text that is safe to send.

    Bytes that are no UTF-8 become U+FFFD exactly as in `bytes.decode("utf-8", "replace")` of the whole.
    """
    return _take(state, piece, final=False)


def finish(state: StreamState) -> tuple[StreamState, str]:
    """Return what was held back, now that no token follows; an unfinished character becomes U+FFFD."""
    state, text = _take(state, b"", final=True)
    return replace(state, held=""), text + state.held


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return where the stop string begins that is complete first, and which it is; the longest when two end together.

    By its end, not its beginning: only that does not depend on how the text was cut into pieces.
    """
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    _, at, stop = min(found)
    return at, stop


def _take(state: StreamState, piece: bytes, *, final: bool) -> tuple[StreamState, str]:
    if state.stopped is not None:
        return state, ""
    text, pending = _decoded(state.pending + piece, final)
    state = replace(state, pending=pending)
    if text and state.drop_space:
        text = text.removeprefix(" ")
        state = replace(state, drop_space=False)
    text = state.held + text
    hit = first_stop(text, state.stops)
    if hit is not None:
        return replace(state, pending=b"", held="", stopped=hit[1]), text[: hit[0]]
    keep = _held_back(text, state.stops)
    return replace(state, held=text[len(text) - keep :]), text[: len(text) - keep]


def _decoded(data: bytes, final: bool) -> tuple[str, bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final)
    return text, decoder.getstate()[0]


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest ending of `text` that is the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        ending = text[len(text) - length :]
        if any(stop.startswith(ending) for stop in stops):
            return length
    return 0
