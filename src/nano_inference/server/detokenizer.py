"""Turns deltas into text and log-probability entries, as pure steps.

Streams and complete replies use the same steps, so that the chunks of a stream join to the complete reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.server.generation import Generation
from nano_inference.text import stream
from nano_inference.text.dialogue import Part, PartKind, mark_of, parts_of, spelled
from nano_inference.text.stream import StreamState
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_events import Event
from nano_inference.types import Delta, FinishReason, StopReason, TokenLogprob, TopLogprobs

_NEVER = "\ud800"
"""A lone surrogate, which no decoded text contains. Appended to a stop string, it makes `text.stream` hold back a
possible start of the stop string without ever matching: the engine decides which match ends a sample (`min_tokens`)."""


class LogprobEntry(NamedTuple):
    token: int
    text: str  # its part of the text; the parts of all tokens join to the text
    logprob: float | None  # None for a prompt's first token
    top: TopLogprobs | None  # alternatives, most likely first; None for a prompt's first token
    offset: int  # start of its text, in characters


class DecodedDelta(NamedTuple):
    """A delta as text: the part that is final after it."""

    text: str
    token_ids: tuple[int, ...]
    entries: tuple[LogprobEntry, ...]
    finish_reason: FinishReason | None
    stop_reason: StopReason | None
    parts: tuple[Part, ...] = ()
    """The text split into plain text, calculator calls and results; empty without a calculator."""
    delta: Delta | None = None  # the engine's delta; None if the sample was ended at the deadline
    events: tuple[Event, ...] = ()  # the text split into content and tool calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Detokenizer:
    shown: StreamState
    unstopped: StreamState  # the same without stop strings, for the text of single tokens
    offset: int = 0  # characters of the text so far
    inside: PartKind = "text"  # kind of the part that the text so far ends in, with a calculator


def start_detokenizer(generation: Generation, prompt_index: int) -> Detokenizer:
    """Return the state at the start of a sample; offsets count an echoed prompt."""
    offset = len(generation.echo[prompt_index]) if generation.echo else 0
    shown, _ = stream.push(stream.start(drop_space=generation.drop_space), generation.prefix_bytes)
    return Detokenizer(
        shown=replace(shown, stops=tuple(stop + _NEVER for stop in generation.stops)),
        unstopped=shown,
        offset=offset,
        inside=prefix_parts(generation)[1],
    )


def prefix_text(generation: Generation) -> str:
    """Return the text of the answer's prefix, calculator marks spelled out; omits an incomplete character."""
    return spelled(_prefix(generation))


def prefix_parts(generation: Generation) -> tuple[tuple[Part, ...], PartKind]:
    return parts_of(_prefix(generation))


def _prefix(generation: Generation) -> str:
    return stream.push(stream.start(drop_space=generation.drop_space), generation.prefix_bytes)[1]


def detokenize(detokenizer: Detokenizer, delta: Delta, generation: Generation) -> tuple[Detokenizer, DecodedDelta]:
    """Decode a delta; return the new state and the text that is final after it."""
    sample, hidden, stop = delta.sample, 0, None
    if sample is not None and sample.finish_reason == "stop":
        stop = sample.stop_reason if isinstance(sample.stop_reason, str) else None
        hidden = int(stop is None and not generation.include_stop)  # a stop token at the end
    shown, text = detokenizer.shown, ""
    for index in range(1, len(delta.token_ids) - hidden + 1):
        data = _data(delta, index - 1, generation)
        if stop is not None and index == len(delta.token_ids):
            shown, piece = _end_at_stop(shown, data, stop, generation.include_stop)
        else:
            shown, piece = stream.push(shown, data)
        text += piece
    if sample is not None:
        shown, rest = stream.finish(shown)
        text += rest
    parts, inside = parts_of(text, detokenizer.inside) if generation.tool is not None else ((), detokenizer.inside)
    detokenizer = replace(detokenizer, shown=shown, inside=inside)
    entries: tuple[LogprobEntry, ...] = ()
    if generation.logprobs is not None:
        detokenizer, entries = _entries(detokenizer, delta, hidden, generation)
    return detokenizer, DecodedDelta(
        text=spelled(text) if generation.tool is not None else text,
        token_ids=delta.token_ids,
        entries=entries,
        finish_reason=None if sample is None else sample.finish_reason,
        stop_reason=None if sample is None else sample.stop_reason,
        parts=parts,
        delta=delta,
    )


def flush(detokenizer: Detokenizer, generation: Generation, reason: str) -> DecodedDelta:
    """Return the text held back, for a sample that is ended with finish reason "length"."""
    text = stream.finish(detokenizer.shown)[1]
    if generation.tool is None:
        return DecodedDelta(text, (), (), "length", reason)
    return DecodedDelta(spelled(text), (), (), "length", reason, parts_of(text, detokenizer.inside)[0])


def prompt_entries(
    tokens: Sequence[int],
    scores: Sequence[float],
    tops: Sequence[TopLogprobs] | None,
    generation: Generation,
) -> tuple[LogprobEntry, ...]:
    """Return the entries of an echoed prompt; the first token has no log-probability."""
    state, offset = stream.start(), 0
    entries: list[LogprobEntry] = []
    for index, token in enumerate(tokens):
        state, text = stream.push(state, visible_bytes(token, generation.tokenizer, generation.skip_special))
        if index == len(tokens) - 1:
            text += stream.finish(state)[1]
        logprob: float | None = None
        top: TopLogprobs | None = None
        if index > 0:
            logprob = scores[index - 1]
            top = _with_own(tops[index - 1][: generation.logprobs] if tops else (), token, logprob)
        entries.append(LogprobEntry(token, text, logprob, top, offset))
        offset += len(text)
    return tuple(entries)


def visible_bytes(token: int, tokenizer: Tokenizer, skip_special: bool) -> bytes:
    """Return a token's visible bytes: none for a hidden special token or an id outside the tokenizer's vocabulary."""
    if token >= tokenizer.vocab_size or (skip_special and token in tokenizer.special_ids):
        return b""
    return tokenizer.token_bytes(token)


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a single token; bytes that are not valid UTF-8 as `bytes:\\xe2\\x80`."""
    data = token_bytes_of(token, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes_of(token: int, tokenizer: Tokenizer) -> bytes:
    """Return a token's bytes; none for an id in the padding of the vocabulary."""
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def _data(delta: Delta, index: int, generation: Generation) -> bytes:
    """Return a token's visible bytes, with marks for calculator calls and tool calls."""
    if generation.tool is not None:
        is_cut = delta.sample is not None and delta.sample.finish_reason == "length"
        mark = mark_of(generation.tool, delta.token_ids, index, is_cut)
        if mark is not None:
            return mark.encode()
    if delta.token_ids[index] in generation.markers:
        return generation.tokenizer.token_bytes(delta.token_ids[index])
    return visible_bytes(delta.token_ids[index], generation.tokenizer, generation.skip_special)


def _end_at_stop(state: StreamState, data: bytes, stop: str, include: bool) -> tuple[StreamState, str]:
    """Add the bytes that complete a stop string; return the text before it, and with `include` the stop string.

    Searches only for an occurrence that these bytes complete: the engine ignored earlier ones. Not found if a special
    token, whose text is hidden, completed it.
    """
    after, text = stream.push(replace(state, stops=()), data)
    at = text.find(stop, max(0, len(state.held) - len(stop) + 1))
    if at < 0:
        return after, text
    return replace(after, stopped=stop), text[:at] + (stop if include else "")


def _entries(
    detokenizer: Detokenizer, delta: Delta, hidden: int, generation: Generation
) -> tuple[Detokenizer, tuple[LogprobEntry, ...]]:
    """Return one entry per token with the text that it completes; the last gets the incomplete end of the text."""
    unstopped, offset = detokenizer.unstopped, detokenizer.offset
    tops = delta.top_logprobs or ((),) * len(delta.token_ids)
    entries: list[LogprobEntry] = []
    last = len(delta.token_ids) - 1
    for index, (token, logprob, top) in enumerate(zip(delta.token_ids, delta.logprobs, tops, strict=True)):
        text = ""
        if index <= last - hidden:
            unstopped, text = stream.push(unstopped, _data(delta, index, generation))
        if index == last and delta.sample is not None:
            unstopped, rest = stream.finish(unstopped)
            text += rest
        text = spelled(text) if generation.tool is not None else text
        entries.append(LogprobEntry(token, text, logprob, _with_own(top, token, logprob), offset))
        offset += len(text)
    return replace(detokenizer, unstopped=unstopped, offset=offset), tuple(entries)


def _with_own(top: TopLogprobs, token: int, logprob: float) -> TopLogprobs:
    """Return the alternatives with the token itself, appended if it is not among them."""
    return top if any(one.token == token for one in top) else (*top, TokenLogprob(token, logprob))
