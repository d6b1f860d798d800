"""`Reply`, from which dialects derive theirs, and OpenAI's: choices, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, ClassVar, Generic, TypeVar

from nano_inference.server.detokenizer import (
    DecodedDelta,
    LogprobEntry,
    prefix_parts,
    prompt_entries,
    token_bytes_of,
    token_text,
    visible_bytes,
)
from nano_inference.server.errors import ApiError
from nano_inference.server.events import DONE, event, events
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.timings import metrics_of, prefill_reports, requested_timings
from nano_inference.server.tools import call_deltas, message_content, reasoning_fields
from nano_inference.server.transcript import Transcript, usage
from nano_inference.text.dialogue import Part
from nano_inference.types import StopReason, TrainingSample, spans_of

_NO_EXTRAS: Mapping[str, Any] = {}

Options = TypeVar("Options")


@dataclass
class Reply(Generic[Options]):
    """Makes the reply to one generation: whole, or a stream of `start`, a `part` for each delta, and `end` or `fail`.

    Used only by the coroutine that answers. A stream that a class says nothing else about starts without events, and
    ends as OpenAI's does.
    """

    keeps: ClassVar[bool] = False
    """True if a part needs all that its sample has so far: the transcripts of a stream then keep text and entries."""
    generation: Generation
    transcripts: Sequence[Transcript]
    """What each sample has so far."""

    @property
    def options(self) -> Options:
        options: Options = self.generation.options
        return options

    def whole(self) -> Any:
        """Return the JSON value of a reply that is not streamed."""
        raise NotImplementedError(f"{type(self).__name__} has no `whole`")

    def start(self) -> bytes:
        """Return the events that start a stream."""
        return b""

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        """Return the events of one decoded delta, which the sample's transcript includes."""
        raise NotImplementedError(f"{type(self).__name__} has no `part`: its route does not stream")

    def end(self) -> bytes:
        """Return the events that end a stream without an error: [DONE]."""
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        return self.broken(error)

    @staticmethod
    def broken(error: ApiError, first: bytes = b"", number: int = 0) -> bytes:
        """Return what ends a stream of which only this is known: the error object and [DONE].

        A server that forwards another's stream knows the first events that were sent, and the number of all.
        """
        return event(error.to_dict()) + DONE


@dataclass
class OpenAIReply(Reply[Any]):
    """The reply to a completion or a chat completion."""

    _echoed: set[int] = field(init=False, default_factory=set)
    """Samples of a stream whose prompt was echoed with its log-probabilities."""

    def __post_init__(self) -> None:
        generation = self.generation
        self._is_chat = generation.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}
        self._head: JSON = {**head, "system_fingerprint": generation.fingerprint}

    def whole(self) -> JSON:
        generation, is_chat = self.generation, self._is_chat
        reply: JSON = {
            "id": generation.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": generation.created,
            "model": generation.model,
            "choices": [
                self._chat_choice(one) if is_chat else self._completion_choice(one) for one in self.transcripts
            ],
            "usage": usage(generation, self.transcripts),
            "system_fingerprint": generation.fingerprint,
            **self._ending(),
        }
        return reply | self._prompt_facts(self.transcripts[0]) if is_chat else reply

    def start(self) -> bytes:
        return self._events(self.first_chunks())

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        return self._events(self.delta_chunks(transcript, decoded))

    def end(self) -> bytes:
        return events([self.usage_chunk()] if self.generation.include_usage else []) + DONE

    def first_chunks(self) -> list[JSON]:
        """Return the first chunks of a stream: in a chat each choice's role, then echoed text and the prompt's ids."""
        generation, requests, transcripts = self.generation, self.generation.requests, self.transcripts
        if self._is_chat:
            chunks = [self._chunk(one.index, {"role": "assistant", "content": None}) for one in transcripts]
            if generation.token_ids:
                chunks[0]["prompt_token_ids"] = list(requests[0].prompt)
            prefix = _prefix_ids(generation)
            texts = generation.echo or (("",) if prefix else ())
            return chunks + [
                self._chunk(one.index, _echo_delta(generation, text), prefix) for text in texts for one in transcripts
            ]
        chunks = []
        # With log-probabilities it comes with the first token, as in vLLM: then it has been computed.
        echo = () if generation.echo_logprobs else generation.echo
        for one in transcripts if echo or generation.token_ids else ():
            text = echo[one.prompt_index] if echo else ""
            ids = {"prompt_token_ids": list(requests[one.prompt_index].prompt)} if generation.token_ids else {}
            chunks.append(self._chunk(one.index, text, ids))
        return chunks

    def delta_chunks(self, transcript: Transcript, decoded: DecodedDelta) -> list[JSON]:
        """Return the chunks of one delta: its content, and at its end an empty chunk with the finish reason."""
        generation = self.generation
        extras: JSON = {}
        echo, entries = self._echo(transcript, decoded)
        if generation.logprobs is not None and entries:
            extras["logprobs"] = self._logprobs(entries)
        extras |= token_facts(decoded, generation)
        chunks: list[JSON] = [
            self._chunk(transcript.index, {} if self._is_chat else "") | {"prompt_progress": report}
            for report in prefill_reports(generation, transcript, decoded)
        ]
        contents: Sequence[Any] = [echo + decoded.text]
        if self._is_chat:
            contents = call_deltas(decoded.events)
            if generation.tool is not None and decoded.parts:
                contents = [{"content": decoded.text, "parts": [part._asdict() for part in decoded.parts]}]
            contents = contents or ([{"content": ""}] if extras else [])
        for content in contents:
            if content or extras:
                chunks.append(self._chunk(transcript.index, content, extras))
            extras = {}  # only in the first chunk
        if decoded.finish_reason is not None:
            reasons = {"stop_reason": decoded.stop_reason, "matched_stop": matched_stop(transcript)}
            reasons |= version_facts(transcript, generation)
            # vLLM, whose option it is, sends no chunk without tokens while it counts them
            if not (generation.continuous_usage and decoded.text and chunks):
                chunks.append(self._chunk(transcript.index, {} if self._is_chat else ""))
            chunks[-1]["choices"][0] |= {**reasons, "finish_reason": finish_reason_of(transcript)}
        timings = requested_timings(generation, transcript)
        return [chunk | timings for chunk in chunks] if timings else chunks

    def _echo(self, transcript: Transcript, decoded: DecodedDelta) -> tuple[str, Sequence[LogprobEntry]]:
        """Return the text put before a delta's, and the delta's entries, after the prompt's if that is echoed here."""
        prefill, at = None if decoded.delta is None else decoded.delta.prefill, transcript.prompt_index
        is_due = self.generation.echo_logprobs and transcript.index not in self._echoed
        if not is_due or prefill is None or prefill.logprobs is None:
            return "", decoded.entries
        self._echoed.add(transcript.index)
        tokens, scores, tops = self.generation.requests[at].prompt, prefill.logprobs, prefill.top_logprobs
        entries = prompt_entries(tokens, scores, tops, self.generation)
        return self.generation.echo[at], (*entries, *decoded.entries)

    def usage_chunk(self) -> JSON:
        sums = {"choices": [], "usage": usage(self.generation, self.transcripts)}
        return {**self._head, **sums, **self._ending()}

    def _ending(self) -> JSON:
        """Return llama.cpp's `timings` if requested, and vLLM's `metrics` of one sample if the server reports them."""
        first = self.transcripts[0]
        has_metrics = self.generation.metrics and len(self.transcripts) == 1
        return requested_timings(self.generation, first) | ({"metrics": metrics_of(first)} if has_metrics else {})

    def _prompt_facts(self, transcript: Transcript) -> JSON:
        generation, prompt = self.generation, self.generation.requests[transcript.prompt_index].prompt
        scores = prompt_logprobs(transcript.sample, generation)
        return {"prompt_logprobs": scores, "prompt_token_ids": list(prompt) if generation.token_ids else None}

    def _events(self, chunks: Sequence[JSON]) -> bytes:
        if self.generation.continuous_usage and chunks:
            so_far = usage(self.generation, self.transcripts, with_cached=False)
            chunks = [{**chunk, "usage": so_far} for chunk in chunks]
        return events(chunks)

    def _chunk(self, index: int, content: Any, extras: Mapping[str, Any] = _NO_EXTRAS) -> JSON:
        choice: JSON = {"index": index, "delta" if self._is_chat else "text": content}
        choice |= {"logprobs": None, "finish_reason": None, **extras}
        chunk = {**self._head, "choices": [choice]}
        if self.generation.include_usage:
            chunk["usage"] = None
        return chunk

    def _chat_choice(self, transcript: Transcript) -> JSON:
        generation = self.generation
        echo = generation.echo[transcript.prompt_index] if generation.echo else ""
        message = message_content(transcript.events)
        content = None if message.content is None and not echo else echo + (message.content or "")
        choice: JSON = {
            "index": transcript.index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None if generation.logprobs is None else self._logprobs(transcript.entries),
            "finish_reason": finish_reason_of(transcript),
            "stop_reason": transcript.stop_reason,
            "matched_stop": matched_stop(transcript),
        }
        if message.reasoning:
            choice["message"] |= reasoning_fields(message.reasoning)
        if message.tool_calls:
            choice["message"]["tool_calls"] = message.tool_calls
        if generation.tool is not None:
            prefix = prefix_parts(generation)[0] if echo else ()
            choice["message"]["parts"] = [part._asdict() for part in joined([*prefix, *transcript.parts])]
        return choice | _prefix_ids(generation) | sample_facts(transcript, generation)

    def _completion_choice(self, transcript: Transcript) -> JSON:
        generation, sample = self.generation, transcript.sample
        prompt = generation.requests[transcript.prompt_index].prompt
        echo = generation.echo[transcript.prompt_index] if generation.echo else ""
        entries: Sequence[LogprobEntry] = transcript.entries
        if generation.echo_logprobs and sample is not None:
            scores, tops = sample.prompt_logprobs or (), sample.prompt_top_logprobs
            entries = [*prompt_entries(prompt, scores, tops, generation), *transcript.entries]
        choice: JSON = {
            "index": transcript.index,
            "text": echo + transcript.text,
            "logprobs": None if generation.logprobs is None else self._logprobs(entries),
            "finish_reason": transcript.finish_reason,
            "stop_reason": transcript.stop_reason,
            "matched_stop": matched_stop(transcript),
        }
        return choice | self._prompt_facts(transcript) | sample_facts(transcript, generation)

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> JSON:
        generation = self.generation
        if self._is_chat:
            return {"content": token_logprobs(entries, generation)}
        name = _namer(generation)
        return {  # of completions: four parallel lists
            "tokens": [f"token_id:{entry.token}" if generation.tokens_as_ids else entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry.top is None else _alternatives(entry, name, own_first=not generation.named)
                for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }


def _echo_delta(generation: Generation, text: str) -> JSON:
    """Return the delta that echoes a text; with a calculator, the text of an answer prefix has its parts."""
    parts = prefix_parts(generation)[0] if generation.tool is not None and text else ()
    return {"content": text, "parts": [part._asdict() for part in parts]} if parts else {"content": text}


def _prefix_ids(generation: Generation) -> JSON:
    return {"answer_token_ids": list(generation.prefix_ids)} if generation.prefix_ids and generation.token_ids else {}


def finish_reason_of(transcript: Transcript) -> str | None:
    """Return the finish reason: "tool_calls" for a sample that stopped after a tool call."""
    return "tool_calls" if transcript.num_calls and transcript.finish_reason == "stop" else transcript.finish_reason


def matched_stop(transcript: Transcript) -> StopReason | None:
    """Return SGLang's `matched_stop`: what ended the answer, also if it was the model's end token; else None."""
    if transcript.finish_reason != "stop":
        return None
    return transcript.token_ids[-1] if transcript.stop_reason is None else transcript.stop_reason


def token_facts(decoded: DecodedDelta, generation: Generation) -> JSON:
    delta = decoded.delta
    if delta is None or not delta.token_ids:
        return {}
    facts: JSON = {}
    if generation.token_ids:
        versions = list(delta.versions)
        facts = {"token_ids": list(delta.token_ids), "mask": list(delta.mask), "token_versions": versions}
        if delta.adapter_versions:
            facts["adapter_token_versions"] = list(delta.adapter_versions)
    if delta.raw_logprobs is not None:
        facts["raw_logprobs"] = list(delta.raw_logprobs)
    if delta.sampling_masks is not None:
        facts["sampling_mask"] = delta.sampling_masks
    return facts


def sample_facts(transcript: Transcript, generation: Generation) -> JSON:
    """Return the requested fields about a sample's tokens, with the spans of weight versions."""
    ids = {"token_ids": list(transcript.token_ids), "mask": list(transcript.mask)}
    facts: JSON = ids if generation.token_ids else {}
    params, sample = generation.requests[transcript.prompt_index].params, transcript.sample
    if params.raw_logprobs and sample is not None:
        facts["raw_logprobs"] = sample.raw_logprobs
    if params.sampling_mask and sample is not None:
        facts["sampling_mask"] = sample.sampling_masks
    return facts | version_facts(transcript, generation)


def version_facts(transcript: Transcript, generation: Generation) -> JSON:
    """Return the spans of tokens sampled with the same weights, in vLLM's form, and those of an adapter's versions.

    `version` is the trainer's label, or else the number of updates before, which is also in `number`. `lineage`
    identifies the engine that counted; it is present once the sample has ended.
    """
    if not (generation.versions or generation.token_ids):
        return {}
    labels = transcript.sample.version_labels if transcript.sample is not None else {}
    lineage = transcript.sample.lineage if transcript.sample is not None else None
    facts: JSON = {} if lineage is None else {"lineage": lineage}
    facts["weight_versions"] = [
        {"version": str(number if label is None else label), "start": start, "end": end, "number": number}
        for number, start, end, label in spans_of(transcript.versions, labels)
    ]
    spans, start = [], 0
    for version, run in groupby(transcript.adapter_versions):
        end = start + len(list(run))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return facts | ({"adapter_versions": spans} if spans else {})


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return parts with adjacent ones of one kind joined."""
    return [Part(kind, "".join(part.text for part in run)) for kind, run in groupby(parts, key=lambda part: part.type)]


def token_logprobs(entries: Sequence[LogprobEntry], generation: Generation) -> list[JSON]:
    """Return one object per token, with its bytes and `top_logprobs`."""
    count = None if generation.named else generation.logprobs or 0  # beside named tokens, as in vLLM, the sampled one
    name = _namer(generation)
    data = cache(lambda token: list(token_bytes_of(token, generation.tokenizer)))
    return [
        {
            "token": f"token_id:{entry.token}" if generation.tokens_as_ids else entry.text,
            "logprob": entry.logprob,
            "bytes": list(_own_bytes(entry, generation)),
            **_id_of(entry.token, generation),
            "top_logprobs": [
                {"token": name(one.token), "logprob": one.logprob, "bytes": data(one.token)}
                | _id_of(one.token, generation)
                for one in (entry.top or ())[:count]
            ],
        }
        for entry in entries
    ]


def _own_bytes(entry: LogprobEntry, generation: Generation) -> bytes:
    """Return a token's own bytes, also if its text is empty because its character is not complete; none if hidden."""
    is_hidden = generation.skip_special and entry.token not in generation.markers
    data = visible_bytes(entry.token, generation.tokenizer, is_hidden)
    # The marks of a calculator are special tokens.
    return data if data or generation.tool is None else entry.text.encode()


def _id_of(token: int, generation: Generation) -> JSON:
    return {"token_id": token} if generation.token_ids else {}


def _alternatives(entry: LogprobEntry, name: Callable[[int], str], *, own_first: bool) -> JSON:
    """Return name -> log-probability of a token's alternatives; `own_first`: its own first, as in vLLM."""
    named = {name(one.token): one.logprob for one in entry.top or ()}
    own = name(entry.token)
    return {own: named[own], **named} if own_first and own in named else named


def prompt_logprobs(sample: TrainingSample | None, generation: Generation) -> list[JSON | None] | None:
    """Return vLLM's form: None for tokens without a score, else token id -> log-probability, rank and text.

    None unless they are requested.
    """
    if generation.prompt_logprobs is None:
        return None
    if sample is None:
        return []
    scores = sample.prompt_logprobs or ()
    tops = sample.prompt_top_logprobs or ((),) * len(scores)
    text = cache(lambda token: token_text(token, generation.tokenizer))
    start = max(1, generation.requests[0].score_start)
    rows: list[JSON | None] = [None] * start
    ranks = sample.prompt_ranks or (None,) * len(scores)
    scored = sample.prompt_tokens[start : start + len(scores)]  # fewer than all if the request was aborted
    for token, score, top, token_rank in zip(scored, scores, tops, ranks, strict=True):
        row = {
            str(one.token): {"logprob": one.logprob, "rank": rank, "decoded_token": text(one.token)}
            for rank, one in enumerate(top[: generation.prompt_logprobs], start=1)
        }
        own = {"logprob": score, "rank": token_rank, "decoded_token": text(token)}
        rows.append({**row, **({} if str(token) in row else {str(token): own})})
    return rows + [None] * (len(sample.prompt_tokens) - len(rows))


def _namer(generation: Generation) -> Callable[[int], str]:
    """Return a cached function that returns the name of an alternative token."""
    return cache(
        lambda token: f"token_id:{token}" if generation.tokens_as_ids else token_text(token, generation.tokenizer)
    )
