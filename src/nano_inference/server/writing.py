"""Deltas to text, as pure steps: what each brings that a client may see, and its log-probabilities.

The same steps write a stream and a whole reply, so that the one is always the other cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.server.calls import ReplyShape
from nano_inference.text import stream
from nano_inference.text.stream import StreamState
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import Delta, FinishReason, StopReason, TokenLogprob, TopLogprobs


class Entry(NamedTuple):
    """The log-probability of one token."""

    token: int
    text: str
    """What it adds to the text: all of them together are the text."""
    logprob: float | None
    """None for a prompt's first token, which has no predecessor."""
    top: TopLogprobs | None
    """Alternatives, likeliest first; None where there are none to tell of."""
    offset: int
    """Where its text begins, in characters."""


class Written(NamedTuple):
    """What one delta brought."""

    text: str
    token_ids: tuple[int, ...]
    entries: tuple[Entry, ...]
    finish_reason: FinishReason | None
    stop_reason: StopReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pen:
    """Where the writing of one sample stands."""

    shown: StreamState
    spelled: StreamState
    """The same without stop strings: the text of single tokens."""
    offset: int = 0
    """Characters of the tokens' texts so far."""


def begin(shape: ReplyShape, prompt_index: int) -> Pen:
    """Return the pen at the beginning of a sample, behind the prompt when that is echoed."""
    offset = len(shape.echo[prompt_index]) if shape.echo else 0
    return Pen(
        shown=stream.start(stops=shape.stops, drop_space=shape.drop_space),
        spelled=stream.start(drop_space=shape.drop_space),
        offset=offset,
    )


def write(pen: Pen, delta: Delta, shape: ReplyShape, tokenizer: Tokenizer) -> tuple[Pen, Written]:
    """Take a delta; return the pen behind it and what a client may see of it."""
    hidden = _hidden_end(delta, shape)
    shown, text = pen.shown, ""
    sample = delta.sample
    last = len(delta.token_ids) - 1
    for index, token in enumerate(delta.token_ids[: len(delta.token_ids) - hidden]):
        data = seen_bytes(token, tokenizer, shape.skip_special)
        stops_here = sample is not None and index == last and isinstance(sample.stop_reason, str)
        shown, piece = stream.push(shown, data) if stops_here else _go_on(shown, data)
        text += piece
    if sample is not None:
        shown, rest = stream.finish(shown)
        text += rest
        if shape.include_stop and shown.stopped is not None:
            text += shown.stopped
    pen = replace(pen, shown=shown)
    entries: tuple[Entry, ...] = ()
    if shape.logprobs is not None:
        pen, entries = _entries(pen, delta, hidden, shape, tokenizer)
    return pen, Written(
        text=text,
        token_ids=delta.token_ids,
        entries=entries,
        finish_reason=None if sample is None else sample.finish_reason,
        stop_reason=None if sample is None else sample.stop_reason,
    )


def give_up(pen: Pen) -> str:
    """Return the text that was held back, of a sample that ends before its time."""
    return stream.finish(pen.shown)[1]


def prompt_entries(
    tokens: Sequence[int],
    scores: Sequence[float],
    tops: Sequence[TopLogprobs] | None,
    shape: ReplyShape,
    tokenizer: Tokenizer,
) -> tuple[Entry, ...]:
    """Return the entries of an echoed prompt; the first has no log-probability."""
    state, offset = stream.start(), 0
    entries: list[Entry] = []
    for index, token in enumerate(tokens):
        state, text = stream.push(state, seen_bytes(token, tokenizer, shape.skip_special))
        if index == len(tokens) - 1:
            state, rest = stream.finish(state)
            text += rest
        top = tops[index - 1][: shape.logprobs] if tops and index else ()
        known = index > 0
        entries.append(
            Entry(
                token=token,
                text=text,
                logprob=scores[index - 1] if known else None,
                top=_with_own(top, token, scores[index - 1]) if known else None,
                offset=offset,
            )
        )
        offset += len(text)
    return tuple(entries)


def seen_bytes(token: int, tokenizer: Tokenizer, skip_special: bool) -> bytes:
    """Return what a reader sees of a token: nothing of a special one (unless asked for) or of one without a piece."""
    if token >= tokenizer.vocab_size or (skip_special and token in tokenizer.special_ids):
        return b""
    return tokenizer.token_bytes(token)


def alone(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text by itself; bytes that are no text on their own as `bytes:\\xe2\\x80`."""
    data = token_data(token, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_data(token: int, tokenizer: Tokenizer) -> bytes:
    """Return a token's bytes; none for a row of a padded vocabulary."""
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def _hidden_end(delta: Delta, shape: ReplyShape) -> int:
    """Return how many of the last tokens are not shown: the one that a sample stopped at."""
    sample = delta.sample
    if sample is None or sample.finish_reason != "stop" or isinstance(sample.stop_reason, str) or shape.include_stop:
        return 0
    return 1


def _go_on(state: StreamState, data: bytes) -> tuple[StreamState, str]:
    """Take bytes behind which the sample goes on: a stop string that is whole here did not count, and is shown.

    The engine alone decides: before `min_tokens` nothing stops, and it knows the bytes where a text has U+FFFD.
    """
    after, text = stream.push(state, data)
    if after.stopped is None:
        return after, text
    after, rest = stream.push(replace(state, stops=()), data)
    text = ""
    while (hit := stream.first_stop(rest, state.stops)) is not None:
        beyond = hit[0] + 1  # what begins behind its first character may yet become one that counts
        text, rest = text + rest[:beyond], rest[beyond:]
    after, rest = stream.push(replace(after, stops=state.stops, held=rest), b"")
    return after, text + rest


def _entries(
    pen: Pen, delta: Delta, hidden: int, shape: ReplyShape, tokenizer: Tokenizer
) -> tuple[Pen, tuple[Entry, ...]]:
    """Return one entry for each token. Each has the text it completes; an unfinished end falls to the last."""
    spelled, offset = pen.spelled, pen.offset
    tops = delta.top_logprobs or ((),) * len(delta.token_ids)
    entries: list[Entry] = []
    last = len(delta.token_ids) - 1
    for index, (token, logprob, top) in enumerate(zip(delta.token_ids, delta.logprobs, tops, strict=True)):
        text = ""
        if index <= last - hidden:
            spelled, text = stream.push(spelled, seen_bytes(token, tokenizer, shape.skip_special))
        if index == last and delta.sample is not None:
            spelled, rest = stream.finish(spelled)
            text += rest
        entries.append(Entry(token, text, logprob, _with_own(top, token, logprob), offset))
        offset += len(text)
    return replace(pen, spelled=spelled, offset=offset), tuple(entries)


def _with_own(top: TopLogprobs, token: int, logprob: float) -> TopLogprobs:
    """Return alternatives with the token itself among them, at the end when it is none of the likeliest."""
    return top if any(one.token == token for one in top) else (*top, TokenLogprob(token, logprob))
