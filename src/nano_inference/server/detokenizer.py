"""Deltas to text, as pure steps: what each brings that a client may see, and its log-probabilities.

The same steps write a stream and a whole reply, so that the one is always the other cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.server.shape import ReplyShape
from nano_inference.text import stream
from nano_inference.text.dialogue import Part, PartKind, mark_of, parts_of, spelled
from nano_inference.text.stream import StreamState
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_calls import Event
from nano_inference.types import Delta, FinishReason, StopReason, TokenLogprob, TopLogprobs

_NEVER = "\ud800"
"""A lone surrogate, which no text has. A stop string with it behind holds back what may become one and never matches:
the engine alone says which one counts (none before `min_tokens`)."""


class LogprobEntry(NamedTuple):
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


class DecodedDelta(NamedTuple):
    """What one delta brought."""

    text: str
    token_ids: tuple[int, ...]
    entries: tuple[LogprobEntry, ...]
    finish_reason: FinishReason | None
    stop_reason: StopReason | None
    parts: tuple[Part, ...] = ()
    """The text again, with calls of a calculator and their results told apart; empty without one."""
    delta: Delta | None = None
    """What the engine said; None when the time was up."""
    events: tuple[Event, ...] = ()
    """The text once more, with the calls of functions told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detokenizer:
    """Where the writing of one sample stands."""

    shown: StreamState
    unstopped: StreamState
    """The same without stop strings: the text of single tokens."""
    offset: int = 0
    """Characters of the tokens' texts so far."""
    inside: PartKind = "text"
    """What the text stands in, where a calculator is called."""


def start_detokenizer(shape: ReplyShape, prompt_index: int) -> Detokenizer:
    """Return the pen at the beginning of a sample, behind the prompt when that is echoed."""
    offset = len(shape.echo[prompt_index]) if shape.echo else 0
    shown, _ = stream.push(stream.start(drop_space=shape.drop_space), shape.prefix_bytes)
    return Detokenizer(
        shown=replace(shown, stops=tuple(stop + _NEVER for stop in shape.stops)),
        unstopped=shown,
        offset=offset,
        inside=prefix_parts(shape)[1],
    )


def prefix_text(shape: ReplyShape) -> str:
    """Return what an answer began with, marks spelled out; a character that is not whole is left out."""
    return spelled(_begun(shape))


def prefix_parts(shape: ReplyShape) -> tuple[tuple[Part, ...], PartKind]:
    """Return the same as parts, and what it ends in."""
    return parts_of(_begun(shape))


def _begun(shape: ReplyShape) -> str:
    return stream.push(stream.start(drop_space=shape.drop_space), shape.prefix_bytes)[1]


def detokenize(
    detokenizer: Detokenizer, delta: Delta, shape: ReplyShape, tokenizer: Tokenizer
) -> tuple[Detokenizer, DecodedDelta]:
    """Take a delta; return the pen behind it and what a client may see of it."""
    hidden, stop = _hidden_end(delta, shape), _stop_string(delta)
    shown, text = detokenizer.shown, ""
    for index in range(1, len(delta.token_ids) - hidden + 1):
        data = _data(delta, index - 1, shape, tokenizer)
        if stop is not None and index == len(delta.token_ids):
            shown, piece = _stop_in(shown, data, stop, shape.include_stop)
        else:
            shown, piece = stream.push(shown, data)
        text += piece
    sample = delta.sample
    if sample is not None:
        shown, rest = stream.finish(shown)
        text += rest
    parts, inside = parts_of(text, detokenizer.inside) if shape.tool is not None else ((), detokenizer.inside)
    detokenizer = replace(detokenizer, shown=shown, inside=inside)
    entries: tuple[LogprobEntry, ...] = ()
    if shape.logprobs is not None:
        detokenizer, entries = _entries(detokenizer, delta, hidden, shape, tokenizer)
    return detokenizer, DecodedDelta(
        text=spelled(text) if shape.tool is not None else text,
        token_ids=delta.token_ids,
        entries=entries,
        finish_reason=None if sample is None else sample.finish_reason,
        stop_reason=None if sample is None else sample.stop_reason,
        parts=parts,
        delta=delta,
    )


def flush(detokenizer: Detokenizer, shape: ReplyShape, reason: str) -> DecodedDelta:
    """Return the text that was held back, of a sample that ends before its time as "length"."""
    text = stream.finish(detokenizer.shown)[1]
    if shape.tool is None:
        return DecodedDelta(text, (), (), "length", reason)
    return DecodedDelta(spelled(text), (), (), "length", reason, parts_of(text, detokenizer.inside)[0])


def prompt_entries(
    tokens: Sequence[int],
    scores: Sequence[float],
    tops: Sequence[TopLogprobs] | None,
    shape: ReplyShape,
    tokenizer: Tokenizer,
) -> tuple[LogprobEntry, ...]:
    """Return the entries of an echoed prompt; the first has no log-probability."""
    state, offset = stream.start(), 0
    entries: list[LogprobEntry] = []
    for index, token in enumerate(tokens):
        state, text = stream.push(state, visible_bytes(token, tokenizer, shape.skip_special))
        if index == len(tokens) - 1:
            state, rest = stream.finish(state)
            text += rest
        top = tops[index - 1][: shape.logprobs] if tops and index else ()
        known = index > 0
        entries.append(
            LogprobEntry(
                token=token,
                text=text,
                logprob=scores[index - 1] if known else None,
                top=_with_own(top, token, scores[index - 1]) if known else None,
                offset=offset,
            )
        )
        offset += len(text)
    return tuple(entries)


def visible_bytes(token: int, tokenizer: Tokenizer, skip_special: bool) -> bytes:
    """Return what a reader sees of a token: nothing of a special one (unless asked for) or of one without a piece."""
    if token >= tokenizer.vocab_size or (skip_special and token in tokenizer.special_ids):
        return b""
    return tokenizer.token_bytes(token)


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text by itself; bytes that are no text on their own as `bytes:\\xe2\\x80`."""
    data = token_bytes_of(token, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes_of(token: int, tokenizer: Tokenizer) -> bytes:
    """Return a token's bytes; none for a row of a padded vocabulary."""
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def _data(delta: Delta, index: int, shape: ReplyShape, tokenizer: Tokenizer) -> bytes:
    """Return what a reader sees of a token: what `seen_bytes` says, and marks where a calculator is called."""
    if shape.tool is not None:
        is_cut = delta.sample is not None and delta.sample.finish_reason == "length"
        mark = mark_of(shape.tool, delta.token_ids, index, is_cut)
        if mark is not None:
            return mark.encode()
    if delta.token_ids[index] in shape.markers:
        return tokenizer.token_bytes(delta.token_ids[index])
    return visible_bytes(delta.token_ids[index], tokenizer, shape.skip_special)


def _stop_string(delta: Delta) -> str | None:
    """Return the stop string that a sample ended with."""
    sample = delta.sample
    if sample is None or sample.finish_reason != "stop" or not isinstance(sample.stop_reason, str):
        return None
    return sample.stop_reason


def _hidden_end(delta: Delta, shape: ReplyShape) -> int:
    """Return how many of the last tokens are not shown: the one that a sample stopped at."""
    sample = delta.sample
    if sample is None or sample.finish_reason != "stop" or isinstance(sample.stop_reason, str) or shape.include_stop:
        return 0
    return 1


def _stop_in(state: StreamState, data: bytes, stop: str, include: bool) -> tuple[StreamState, str]:
    """Take the bytes that complete a stop string; return the text before it, and the string itself when asked for.

    Only what these bytes complete counts: the engine let an earlier one pass. A special token's own text is not here.
    """
    after, text = stream.push(replace(state, stops=()), data)
    at = text.find(stop, max(0, len(state.held) - len(stop) + 1))
    if at < 0:
        return after, text
    return replace(after, stopped=stop), text[:at] + (stop if include else "")


def _entries(
    detokenizer: Detokenizer, delta: Delta, hidden: int, shape: ReplyShape, tokenizer: Tokenizer
) -> tuple[Detokenizer, tuple[LogprobEntry, ...]]:
    """Return one entry for each token. Each has the text it completes; an unfinished end falls to the last."""
    unstopped, offset = detokenizer.unstopped, detokenizer.offset
    tops = delta.top_logprobs or ((),) * len(delta.token_ids)
    entries: list[LogprobEntry] = []
    last = len(delta.token_ids) - 1
    for index, (token, logprob, top) in enumerate(zip(delta.token_ids, delta.logprobs, tops, strict=True)):
        text = ""
        if index <= last - hidden:
            unstopped, text = stream.push(unstopped, _data(delta, index, shape, tokenizer))
        if index == last and delta.sample is not None:
            unstopped, rest = stream.finish(unstopped)
            text += rest
        text = spelled(text) if shape.tool is not None else text
        entries.append(LogprobEntry(token, text, logprob, _with_own(top, token, logprob), offset))
        offset += len(text)
    return replace(detokenizer, unstopped=unstopped, offset=offset), tuple(entries)


def _with_own(top: TopLogprobs, token: int, logprob: float) -> TopLogprobs:
    """Return alternatives with the token itself among them, at the end when it is none of the likeliest."""
    return top if any(one.token == token for one in top) else (*top, TokenLogprob(token, logprob))
