"""One call of a client: its engine requests, a transcript for each sample, and the interface that makes its reply.

Everything that depends on the client's dialect is behind `Reply`; routes, queues and detokenizing use only this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nano_inference.core.outbox import SampleTimes
from nano_inference.server.detokenizer import (
    DecodedDelta,
    Detokenizer,
    LogprobEntry,
    detokenize,
    flush,
    start_detokenizer,
    token_bytes_of,
)
from nano_inference.server.errors import ApiError
from nano_inference.server.events import DONE, SERVER_SENT_EVENTS, StreamForm, events
from nano_inference.server.shape import ReplyShape
from nano_inference.server.structured import PromptRequest
from nano_inference.server.tools import ToolUse, is_reported
from nano_inference.text.dialogue import Part
from nano_inference.text.reasoning import ReasoningSplitter
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_calls import CallsState, finish, push, start
from nano_inference.text.tool_events import CallEnd, Content, Event, Reasoning, settled
from nano_inference.types import Delta, StopReason, TrainingSample

JSON = dict[str, Any]
Kind = Literal["chat", "completion"]  # input of the model: messages, or a text


class Reply(Protocol):
    """Makes one call's reply in one dialect. Made for each call; used only by the coroutine that answers it.

    A class that derives from this one starts a stream without events, and ends it as OpenAI's API does.
    """

    def body(self, transcripts: Sequence[Transcript]) -> Any:
        """Return the JSON value of a reply that is not streamed."""

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the events that start a stream."""
        return b""

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return the events of one decoded delta of a sample."""

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the events that end a stream without an error: [DONE]."""
        return DONE

    def error_events(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error: the error object and [DONE]."""
        return events([error.to_dict()]) + DONE


@dataclass(slots=True)
class Transcript:
    """The decoded output of one sample so far. Used only by the coroutine that answers the call."""

    prompt_index: int
    index: int  # index among all choices of the call
    detokenizer: Detokenizer
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: StopReason | None = None
    sample: TrainingSample | None = None
    parts: list[Part] = field(default_factory=list)
    call_parser: CallsState | None = None  # state of the tool call parser; None if calls are not parsed
    reasoning: ReasoningSplitter | None = None  # None if reasoning is part of the text
    events: list[Event] = field(default_factory=list)
    num_calls: int = 0  # complete tool calls
    mask: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times: SampleTimes | None = None  # times of the sample's events so far; None if unknown

    def add_delta(self, delta: Delta, shape: ReplyShape, tokenizer: Tokenizer, *, keep: bool = True) -> DecodedDelta:
        """Add a delta; return it decoded. `keep`: keep text and entries, for a reply that is not streamed."""
        self.detokenizer, decoded = detokenize(self.detokenizer, delta, shape, tokenizer)
        decoded = self._split(decoded, shape, is_end=delta.sample is not None)
        if self.reasoning is not None:
            self.reasoning.count(token_bytes_of(token, tokenizer) for token in delta.token_ids)
        return self._added(decoded, shape.functions, keep=keep)

    def cut_short(self, shape: ReplyShape, reason: str) -> DecodedDelta:
        """End the sample at the deadline; return the text that was held back."""
        decoded = self._split(flush(self.detokenizer, shape, reason), shape, is_end=True)
        return self._added(decoded, shape.functions, keep=True)

    def append(self, decoded: DecodedDelta, *, keep: bool = True) -> None:
        """Add a decoded delta; `keep`: also its text, entries, parts and events."""
        self.token_ids += decoded.token_ids
        if decoded.delta is not None:
            self.mask += decoded.delta.mask
            self.versions += decoded.delta.versions
            self.sample = decoded.delta.sample
        if keep:
            self.text += decoded.text
            self.entries += decoded.entries
            self.parts += decoded.parts
            self.events += decoded.events
        self.finish_reason, self.stop_reason = decoded.finish_reason, decoded.stop_reason

    def _added(self, decoded: DecodedDelta, use: ToolUse | None, *, keep: bool) -> DecodedDelta:
        """Add a decoded delta; return it without the events that the client does not get.

        At the end of a reply that is not streamed, calls that are no valid calls become text; a grammar that requires
        calls leaves only those that are cut off.
        """
        self.append(decoded, keep=keep)
        if use is None:
            return decoded
        if keep and decoded.finish_reason is not None:
            events = self.events if use.must_call else settled(self.events)
            self.events = [event for event in events if is_reported(event, use)]
        new = tuple(event for event in decoded.events if is_reported(event, use))
        self.num_calls += sum(isinstance(event, CallEnd) for event in new)
        return decoded._replace(events=new)

    def _split(self, decoded: DecodedDelta, shape: ReplyShape, *, is_end: bool) -> DecodedDelta:
        """Split the text into reasoning, content and tool calls."""
        if self.reasoning is None or shape.reasoning is None:
            return decoded._replace(events=tuple(self._parsed(decoded.text, shape.functions, is_end=is_end)))
        thought, text = self.reasoning.push(decoded.text, is_end=is_end)
        events = self._parsed(text, shape.functions, is_end=is_end)
        return decoded._replace(
            events=(*((Reasoning(thought),) if thought and not shape.reasoning.is_hidden else ()), *events)
        )

    def _parsed(self, text: str, use: ToolUse | None, *, is_end: bool) -> list[Event]:
        """Return the content and the calls that a text adds."""
        if self.call_parser is None or use is None:
            return [Content(text)] if text else []
        self.call_parser, events = push(self.call_parser, text)
        return [*events, *finish(self.call_parser)] if is_end else events


def transcripts_of(call: Call, times: Sequence[Sequence[SampleTimes]] | None = None) -> list[Transcript]:
    """Return an empty transcript for each choice, prompt by prompt; `times` are indexed by prompt and sample."""
    use = call.shape.functions
    call_parser = None if use is None else start(use.format, use.names, is_free=not use.strict)
    opening = call.shape.reasoning
    return [
        Transcript(
            prompt_index=prompt,
            index=prompt * call.num_samples + sample,
            detokenizer=start_detokenizer(call.shape, prompt),
            call_parser=call_parser,
            reasoning=opening and ReasoningSplitter(starts_inside=opening.is_inside, prefix=opening.prefix),
            times=None if times is None else times[prompt][sample],
        )
        for prompt in range(len(call.requests))
        for sample in range(call.num_samples)
    ]


def num_reasoning_tokens(transcripts: Iterable[Transcript]) -> int:
    """Return the number of tokens of samples' reasoning, which are included in the output's."""
    return sum(one.reasoning.num_tokens for one in transcripts if one.reasoning is not None)


def usage(call: Call, transcripts: Iterable[Transcript], *, with_cached: bool = True) -> JSON:
    """Return OpenAI's `usage` object: each prompt counted once, every output token, and reasoning if there is any."""
    transcripts = list(transcripts)
    num_prompt = sum(len(request.prompt) for request in call.requests)
    num_new = sum(len(transcript.token_ids) for transcript in transcripts)
    out: JSON = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    if with_cached:
        firsts = (transcript.sample for transcript in transcripts if transcript.index % call.num_samples == 0)
        cached = sum(sample.num_cached_tokens for sample in firsts if sample is not None)
        out["prompt_tokens_details"] = {"cached_tokens": cached}
    if (num_reasoning := num_reasoning_tokens(transcripts)) > 0:
        out["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a client: requests for the engine, and how to make the reply."""

    kind: Kind
    id: str
    model: str
    fingerprint: str | None = None  # OpenAI's `system_fingerprint`: changes with the program and the model
    requests: tuple[PromptRequest, ...]
    num_samples: int  # samples per prompt
    num_tokens: int  # upper bound of its tokens, prompts and outputs
    shape: ReplyShape
    stream: bool = False
    form: StreamForm = SERVER_SENT_EVENTS  # form of a stream; its route's
    include_usage: bool = False
    continuous_usage: bool = False
    make_reply: MakeReply
    names: frozenset[str] = frozenset()  # ids by which a client may abort it
    forbids_tokens: bool = False  # True if the client excludes tokens, possibly all of them
    reduced_max_tokens: int | None = None
    """Tokens of a sample that the context has room for, if fewer than `max_tokens`; else None."""

    @property
    def total_samples(self) -> int:
        """Samples of all prompts."""
        return self.num_samples * len(self.requests)


MakeReply = Callable[[Call, Tokenizer, int], Reply]
"""Returns the reply object of a call; the number is its creation time, seconds since 1970."""


def reply_size(call: Call, transcripts: Sequence[Transcript]) -> int:
    """Return the approximate number of tokens, alternatives and values in a reply that is not streamed."""
    shape = call.shape
    num_new = sum(len(transcript.token_ids) for transcript in transcripts)
    num_prompt = sum(len(request.prompt) for request in call.requests) * call.num_samples
    per_new = 0 if shape.logprobs is None else 2 + shape.logprobs
    per_prompt = 0 if shape.prompt_logprobs is None else 2 + shape.prompt_logprobs
    num_values = sum(
        len(transcript.sample.embedding or ()) for transcript in transcripts if transcript.sample is not None
    )
    return num_values + num_new * (1 + per_new) + num_prompt * (per_prompt + (per_new if shape.echo_logprobs else 0))
