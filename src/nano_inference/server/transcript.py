"""`Transcript`: the decoded output of one sample so far; and counts over all samples of a generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.tools import ToolUse, is_reported
from nano_inference.text.dialogue import Part
from nano_inference.text.reasoning import ReasoningSplitter
from nano_inference.text.tool_calls import CallsState, finish, push, start
from nano_inference.text.tool_events import CallEnd, Content, Event, Reasoning, settled
from nano_inference.types import Delta, SamplingMask, StopReason, TrainingSample, WeightLabel


@dataclass(slots=True)
class Transcript:
    """The decoded output of one sample so far. Used only by the coroutine that answers."""

    prompt_index: int
    index: int  # index among all choices of the reply
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
    adapter_versions: list[WeightLabel] = field(default_factory=list)  # empty without an adapter
    sampling_masks: list[SamplingMask] = field(default_factory=list)
    num_reported: int | None = None  # tokens of the prompt in the latest report of its prefill (`timings`)
    times: SampleTimes | None = None  # times of the sample's events so far; None if unknown

    def add_delta(self, delta: Delta, generation: Generation, *, keep: bool = True) -> DecodedDelta:
        """Add a delta; return it decoded. `keep`: keep text and entries, for a reply that needs all of them."""
        self.detokenizer, decoded = detokenize(self.detokenizer, delta, generation)
        decoded = self._split(decoded, generation, is_end=delta.sample is not None)
        if self.reasoning is not None:
            self.reasoning.count(token_bytes_of(token, generation.tokenizer) for token in delta.token_ids)
        return self._added(decoded, generation.functions, keep=keep)

    def cut_short(self, generation: Generation, reason: str) -> DecodedDelta:
        """End the sample at the deadline; return the text that was held back."""
        decoded = self._split(flush(self.detokenizer, generation, reason), generation, is_end=True)
        return self._added(decoded, generation.functions, keep=True)

    def append(self, decoded: DecodedDelta, *, keep: bool = True) -> None:
        """Add a decoded delta; `keep`: also its text, entries, parts and events."""
        self.token_ids += decoded.token_ids
        if decoded.delta is not None:
            self.mask += decoded.delta.mask
            self.versions += decoded.delta.versions
            self.adapter_versions += decoded.delta.adapter_versions
            self.sample = decoded.delta.sample
            if keep:
                self.sampling_masks += decoded.delta.sampling_masks or ()
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

    def _split(self, decoded: DecodedDelta, generation: Generation, *, is_end: bool) -> DecodedDelta:
        if self.reasoning is None or generation.reasoning is None:
            return decoded._replace(events=tuple(self._parsed(decoded.text, generation.functions, is_end=is_end)))
        thought, text = self.reasoning.push(decoded.text, is_end=is_end)
        events = self._parsed(text, generation.functions, is_end=is_end)
        return decoded._replace(
            events=(*((Reasoning(thought),) if thought and not generation.reasoning.is_hidden else ()), *events)
        )

    def _parsed(self, text: str, use: ToolUse | None, *, is_end: bool) -> list[Event]:
        if self.call_parser is None or use is None:
            return [Content(text)] if text else []
        self.call_parser, events = push(self.call_parser, text)
        return [*events, *finish(self.call_parser)] if is_end else events


def transcripts_of(generation: Generation, times: Sequence[Sequence[SampleTimes]] | None = None) -> list[Transcript]:
    """Return an empty transcript for each choice, prompt by prompt; `times` are indexed by prompt and sample."""
    use = generation.functions
    call_parser = None if use is None else start(use.format, use.names, is_free=not use.strict)
    opening = generation.reasoning
    return [
        Transcript(
            prompt_index=prompt,
            index=prompt * generation.num_samples + sample,
            detokenizer=start_detokenizer(generation, prompt),
            call_parser=call_parser,
            reasoning=opening and ReasoningSplitter(starts_inside=opening.is_inside, prefix=opening.prefix),
            times=None if times is None else times[prompt][sample],
        )
        for prompt in range(len(generation.requests))
        for sample in range(generation.num_samples)
    ]


def num_reasoning_tokens(transcripts: Iterable[Transcript]) -> int:
    """Return the number of tokens of samples' reasoning, which are included in the output's."""
    return sum(one.reasoning.num_tokens for one in transcripts if one.reasoning is not None)


def usage(generation: Generation, transcripts: Iterable[Transcript], *, with_cached: bool = True) -> JSON:
    """Return OpenAI's `usage` object: each prompt counted once, every output token, and reasoning if there is any."""
    transcripts = list(transcripts)
    num_prompt = sum(len(request.prompt) for request in generation.requests)
    num_new = sum(len(transcript.token_ids) for transcript in transcripts)
    out: JSON = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    if with_cached:
        firsts = (transcript.sample for transcript in transcripts if transcript.index % generation.num_samples == 0)
        cached = sum(sample.num_cached_tokens for sample in firsts if sample is not None)
        out["prompt_tokens_details"] = {"cached_tokens": cached}
    if (num_reasoning := num_reasoning_tokens(transcripts)) > 0:
        out["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return out


def reply_size(generation: Generation, transcripts: Sequence[Transcript]) -> int:
    """Return the approximate number of tokens, alternatives and values in a reply that is not streamed."""
    num_new = sum(len(transcript.token_ids) for transcript in transcripts)
    num_prompt = sum(len(request.prompt) for request in generation.requests) * generation.num_samples
    per_new = 0 if generation.logprobs is None else 2 + generation.logprobs
    per_prompt = 0 if generation.prompt_logprobs is None else 2 + generation.prompt_logprobs
    num_values = sum(
        len(transcript.sample.embedding or ()) for transcript in transcripts if transcript.sample is not None
    )
    return (
        num_values + num_new * (1 + per_new) + num_prompt * (per_prompt + (per_new if generation.echo_logprobs else 0))
    )
