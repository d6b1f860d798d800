"""Decode the bytes of tokens to text as a stream: text is returned only when no later token can change it.

The bytes of an incomplete character and a suffix that is a prefix of a stop string are withheld. The functions are
pure: the caller keeps the state, a frozen value.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """State of one stream of text."""

    stops: tuple[str, ...] = ()
    pending: bytes = b""  # the bytes of an incomplete character, at most three
    held: str = ""  # the longest suffix of the text so far that is a prefix of a stop string
    drop_space: bool = False
    """True if a space as the next character is to be dropped: SentencePiece adds one before the first word."""
    stopped: str | None = None  # the stop string that was found; no text follows it


def start(*, stops: tuple[str, ...] = (), drop_space: bool = False) -> StreamState:
    """Return the initial state. Raises `ValueError` for an empty stop string.

    `drop_space`: drop a leading space, for a text that begins here with a tokenizer of `drops_space`.
    """
    if "" in stops:
        raise ValueError("stop must not hold an empty string")
    return StreamState(stops=stops, drop_space=drop_space)


def push(state: StreamState, piece: bytes) -> tuple[StreamState, str]:
    """Add the bytes of the next token; return the new state and the text that is now final.

    Invalid UTF-8 becomes U+FFFD as in `bytes.decode("utf-8", "replace")` of all bytes.
    """
    return _take(state, piece, final=False)


def finish(state: StreamState) -> tuple[StreamState, str]:
    """Return the new state and the withheld text, after the last token; an incomplete character becomes U+FFFD."""
    state, text = _take(state, b"", final=True)
    return replace(state, held=""), text + state.held


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the start and the text of the stop string that ends first; of two with the same end the longest.

    The end decides because it does not depend on how the text was split into tokens.
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
    keep = held_back(text, state.stops)
    return replace(state, held=text[len(text) - keep :]), text[: len(text) - keep]


def _decoded(data: bytes, final: bool) -> tuple[str, bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final)
    return text, decoder.getstate()[0]


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = max((len(stop) for stop in stops), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        ending = text[len(text) - length :]
        if any(stop.startswith(ending) for stop in stops):
            return length
    return 0


MAX_PERIOD, MIN_TIMES, MIN_TOKENS = 48, 6, 128


def repeats(tokens: Sequence[object]) -> bool:
    """Return True if at least the last 128 tokens are one sequence of at most 48, six times or more."""
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_TIMES * period, MIN_TOKENS)
        if len(tokens) >= length and tokens[-length:-period] == tokens[period - length :]:
            return True
    return False
