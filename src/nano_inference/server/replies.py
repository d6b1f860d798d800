"""OpenAI's replies: choices, log-probabilities, usage; complete or as chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from nano_inference.server.call import JSON, Call, Reply, Transcript, usage
from nano_inference.server.detokenizer import (
    DecodedDelta,
    LogprobEntry,
    prefix_parts,
    prompt_entries,
    token_bytes_of,
    token_text,
    visible_bytes,
)
from nano_inference.server.events import DONE, events
from nano_inference.server.shape import ReplyShape
from nano_inference.server.timings import PrefillProgress, metrics_of, timings_of
from nano_inference.server.tools import call_deltas, message_content, reasoning_fields
from nano_inference.text.dialogue import Part
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import StopReason, TrainingSample, spans_of

_NO_EXTRAS: Mapping[str, Any] = {}


class OpenAIReply(Reply):
    """The reply to a completion or a chat completion."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int) -> None:
        self._call = call
        self._shape = call.shape
        self._is_chat = call.kind == "chat"
        self._tokenizer = tokenizer
        self._created = created
        self._progress = PrefillProgress(call)
        self._echoed: set[int] = set()  # samples of a stream whose prompt was echoed with its log-probabilities

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        call, make = self._call, self._chat_choice if self._is_chat else self._completion_choice
        reply: JSON = {
            "id": call.id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self._created,
            "model": call.model,
            "choices": [make(transcript) for transcript in transcripts],
            "usage": usage(call, transcripts),
            "system_fingerprint": call.fingerprint,
            **self._timings(transcripts[0]),
            **self._metrics(transcripts),
        }
        return reply | self._prompt_facts(transcripts[0]) if self._is_chat else reply

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the chunks with roles and echoed text."""
        return self._events(self.first_chunks(transcripts), transcripts)

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        return self._events(self.delta_chunks(transcript, decoded), transcripts)

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the usage chunk if requested, and [DONE]."""
        return events([self.usage_chunk(transcripts)] if self._call.include_usage else []) + DONE

    def first_chunks(self, transcripts: Sequence[Transcript]) -> list[JSON]:
        """Return the first chunks of a stream: in a chat each choice's role, then echoed text and the prompt's ids."""
        shape, requests = self._shape, self._call.requests
        if self._is_chat:
            chunks = [self._chunk(one.index, {"role": "assistant", "content": None}) for one in transcripts]
            if shape.token_ids:
                chunks[0]["prompt_token_ids"] = list(requests[0].prompt)
            prefix = _prefix_ids(shape)
            texts = shape.echo or (("",) if prefix else ())
            return chunks + [
                self._chunk(one.index, _echo_delta(shape, text), prefix) for text in texts for one in transcripts
            ]
        chunks = []
        echo = () if shape.echo_logprobs else shape.echo  # with the first token, as in vLLM: then it has been computed
        for one in transcripts if echo or shape.token_ids else ():
            text = echo[one.prompt_index] if echo else ""
            ids = {"prompt_token_ids": list(requests[one.prompt_index].prompt)} if shape.token_ids else {}
            chunks.append(self._chunk(one.index, text, ids))
        return chunks

    def delta_chunks(self, transcript: Transcript, decoded: DecodedDelta) -> list[JSON]:
        """Return the chunks of one delta: its content, and at its end an empty chunk with the finish reason."""
        shape = self._shape
        extras: JSON = {}
        echo, entries = self._echo(transcript, decoded)
        if shape.logprobs is not None and entries:
            extras["logprobs"] = self._logprobs(entries)
        extras |= token_facts(decoded, shape)
        chunks: list[JSON] = [
            self._chunk(transcript.index, {} if self._is_chat else "") | {"prompt_progress": report}
            for report in self._progress.reports(transcript, decoded)
        ]
        contents: Sequence[Any] = [echo + decoded.text]
        if self._is_chat:
            contents = call_deltas(decoded.events)
            if shape.tool is not None and decoded.parts:
                contents = [{"content": decoded.text, "parts": [part._asdict() for part in decoded.parts]}]
            contents = contents or ([{"content": ""}] if extras else [])
        for content in contents:
            if content or extras:
                chunks.append(self._chunk(transcript.index, content, extras))
            extras = {}  # only in the first chunk
        if decoded.finish_reason is not None:
            reasons = {"stop_reason": decoded.stop_reason, "matched_stop": matched_stop(transcript)}
            reasons |= version_facts(transcript, shape)
            # vLLM, whose option it is, sends no chunk without tokens while it counts them
            if not (self._call.continuous_usage and decoded.text and chunks):
                chunks.append(self._chunk(transcript.index, {} if self._is_chat else ""))
            chunks[-1]["choices"][0] |= {**reasons, "finish_reason": finish_reason_of(transcript)}
        timings = self._timings(transcript)
        return [chunk | timings for chunk in chunks] if timings else chunks

    def _echo(self, transcript: Transcript, decoded: DecodedDelta) -> tuple[str, Sequence[LogprobEntry]]:
        """Return the text put before a delta's, and the delta's entries, after the prompt's if that is echoed here."""
        prefill, at = None if decoded.delta is None else decoded.delta.prefill, transcript.prompt_index
        is_due = self._shape.echo_logprobs and transcript.index not in self._echoed
        if not is_due or prefill is None or prefill.logprobs is None:
            return "", decoded.entries
        self._echoed.add(transcript.index)
        tokens, scores, tops = self._call.requests[at].prompt, prefill.logprobs, prefill.top_logprobs
        entries = prompt_entries(tokens, scores, tops, self._shape, self._tokenizer)
        return self._shape.echo[at], (*entries, *decoded.entries)

    def usage_chunk(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the usage chunk at the end of a stream."""
        sums = {"choices": [], "usage": usage(self._call, transcripts)}
        return {**self._chunk_head(), **sums, **self._timings(transcripts[0]), **self._metrics(transcripts)}

    def _timings(self, transcript: Transcript) -> JSON:
        """Return llama.cpp's `timings` of a sample if they are requested."""
        if not self._shape.timings:
            return {}
        return {"timings": timings_of(self._call, transcript, len(transcript.token_ids))}

    def _metrics(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return vLLM's `metrics` of a reply with one sample if the server reports them."""
        if not self._shape.metrics or len(transcripts) > 1:
            return {}
        return {"metrics": metrics_of(transcripts[0], len(transcripts[0].token_ids))}

    def _prompt_facts(self, transcript: Transcript) -> JSON:
        """Return the fields about a prompt, as in vLLM null unless they are requested."""
        shape, prompt = self._shape, self._call.requests[transcript.prompt_index].prompt
        scores = None
        if shape.prompt_logprobs is not None:
            scores = _prompt_logprobs(transcript.sample, shape, self._tokenizer)
        return {"prompt_logprobs": scores, "prompt_token_ids": list(prompt) if shape.token_ids else None}

    def _events(self, chunks: Sequence[JSON], transcripts: Sequence[Transcript]) -> bytes:
        if self._call.continuous_usage and chunks:
            so_far = usage(self._call, transcripts, with_cached=False)
            chunks = [{**chunk, "usage": so_far} for chunk in chunks]
        return events(chunks)

    def _chunk_head(self) -> JSON:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = {"id": self._call.id, "object": kind, "created": self._created, "model": self._call.model}
        return {**head, "system_fingerprint": self._call.fingerprint}

    def _chunk(self, index: int, content: Any, extras: Mapping[str, Any] = _NO_EXTRAS) -> JSON:
        choice: JSON = {"index": index, "delta" if self._is_chat else "text": content}
        choice |= {"logprobs": None, "finish_reason": None, **extras}
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _chat_choice(self, transcript: Transcript) -> JSON:
        shape = self._shape
        echo = shape.echo[transcript.prompt_index] if shape.echo else ""
        message = message_content(transcript.events)
        content = None if message.content is None and not echo else echo + (message.content or "")
        choice: JSON = {
            "index": transcript.index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None if shape.logprobs is None else self._logprobs(transcript.entries),
            "finish_reason": finish_reason_of(transcript),
            "stop_reason": transcript.stop_reason,
            "matched_stop": matched_stop(transcript),
        }
        if message.reasoning:
            choice["message"] |= reasoning_fields(message.reasoning)
        if message.tool_calls:
            choice["message"]["tool_calls"] = message.tool_calls
        if shape.tool is not None:
            prefix = prefix_parts(shape)[0] if echo else ()
            choice["message"]["parts"] = [part._asdict() for part in joined([*prefix, *transcript.parts])]
        return choice | _prefix_ids(shape) | sample_facts(transcript, shape)

    def _completion_choice(self, transcript: Transcript) -> JSON:
        shape, prompt, sample = self._shape, self._call.requests[transcript.prompt_index].prompt, transcript.sample
        echo = shape.echo[transcript.prompt_index] if shape.echo else ""
        entries: Sequence[LogprobEntry] = transcript.entries
        if shape.echo_logprobs and sample is not None:
            scores, tops = sample.prompt_logprobs or (), sample.prompt_top_logprobs
            entries = [*prompt_entries(prompt, scores, tops, shape, self._tokenizer), *transcript.entries]
        choice: JSON = {
            "index": transcript.index,
            "text": echo + transcript.text,
            "logprobs": None if shape.logprobs is None else self._logprobs(entries),
            "finish_reason": transcript.finish_reason,
            "stop_reason": transcript.stop_reason,
            "matched_stop": matched_stop(transcript),
        }
        return choice | self._prompt_facts(transcript) | sample_facts(transcript, shape)

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> JSON:
        shape = self._shape
        if self._is_chat:
            return {"content": token_logprobs(entries, shape, self._tokenizer)}
        name = _namer(shape, self._tokenizer)
        return {  # of completions: four parallel lists
            "tokens": [f"token_id:{entry.token}" if shape.tokens_as_ids else entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry.top is None else _alternatives(entry, name, own_first=not shape.named)
                for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }


def _echo_delta(shape: ReplyShape, text: str) -> JSON:
    """Return the delta that echoes a text; with a calculator, the text of an answer prefix has its parts."""
    parts = prefix_parts(shape)[0] if shape.tool is not None and text else ()
    return {"content": text, "parts": [part._asdict() for part in parts]} if parts else {"content": text}


def _prefix_ids(shape: ReplyShape) -> JSON:
    """Return the ids of the answer's prefix: the given ones and those that the calculator forced after them."""
    return {"answer_token_ids": list(shape.prefix_ids)} if shape.prefix_ids and shape.token_ids else {}


def finish_reason_of(transcript: Transcript) -> str | None:
    """Return the finish reason: "tool_calls" for a sample that stopped after a tool call."""
    return "tool_calls" if transcript.num_calls and transcript.finish_reason == "stop" else transcript.finish_reason


def matched_stop(transcript: Transcript) -> StopReason | None:
    """Return SGLang's `matched_stop`: what ended the answer, also if it was the model's end token; else None."""
    if transcript.finish_reason != "stop":
        return None
    return transcript.token_ids[-1] if transcript.stop_reason is None else transcript.stop_reason


def token_facts(decoded: DecodedDelta, shape: ReplyShape) -> JSON:
    """Return the requested fields about a delta's tokens."""
    delta = decoded.delta
    if delta is None or not delta.token_ids:
        return {}
    facts: JSON = {}
    if shape.token_ids:
        versions = list(delta.versions)
        facts = {"token_ids": list(delta.token_ids), "mask": list(delta.mask), "token_versions": versions}
    if shape.raw_logprobs and delta.raw_logprobs is not None:
        facts["raw_logprobs"] = list(delta.raw_logprobs)
    if shape.sampling_masks and delta.sampling_masks is not None:
        facts["sampling_mask"] = delta.sampling_masks
    return facts


def sample_facts(transcript: Transcript, shape: ReplyShape) -> JSON:
    """Return the requested fields about a sample's tokens, with the spans of weight versions."""
    facts: JSON = {"token_ids": list(transcript.token_ids), "mask": list(transcript.mask)} if shape.token_ids else {}
    if shape.raw_logprobs and transcript.sample is not None:
        facts["raw_logprobs"] = transcript.sample.raw_logprobs
    if shape.sampling_masks and transcript.sample is not None:
        facts["sampling_mask"] = transcript.sample.sampling_masks
    return facts | version_facts(transcript, shape)


def version_facts(transcript: Transcript, shape: ReplyShape) -> JSON:
    """Return the spans of tokens sampled with the same weights, in vLLM's form.

    `version` is the trainer's label, or else the number of updates before, which is also in `number`. `lineage`
    identifies the engine that counted; it is present once the sample has ended.
    """
    if not (shape.versions or shape.token_ids):
        return {}
    labels = transcript.sample.version_labels if transcript.sample is not None else {}
    lineage = transcript.sample.lineage if transcript.sample is not None else None
    return ({} if lineage is None else {"lineage": lineage}) | {
        "weight_versions": [
            {"version": str(number if label is None else label), "start": start, "end": end, "number": number}
            for number, start, end, label in spans_of(transcript.versions, labels)
        ]
    }


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return parts with adjacent ones of one kind joined."""
    return [Part(kind, "".join(part.text for part in run)) for kind, run in groupby(parts, key=lambda part: part.type)]


def token_logprobs(entries: Sequence[LogprobEntry], shape: ReplyShape, tokenizer: Tokenizer) -> list[JSON]:
    """Return one object per token, with its bytes and `top_logprobs`."""
    count = None if shape.named else shape.logprobs or 0  # beside named tokens, as in vLLM, the sampled one
    name = _namer(shape, tokenizer)
    data = cache(lambda token: list(token_bytes_of(token, tokenizer)))
    return [
        {
            "token": f"token_id:{entry.token}" if shape.tokens_as_ids else entry.text,
            "logprob": entry.logprob,
            "bytes": list(_own_bytes(entry, shape, tokenizer)),
            **_id_of(entry.token, shape),
            "top_logprobs": [
                {"token": name(one.token), "logprob": one.logprob, "bytes": data(one.token), **_id_of(one.token, shape)}
                for one in (entry.top or ())[:count]
            ],
        }
        for entry in entries
    ]


def _own_bytes(entry: LogprobEntry, shape: ReplyShape, tokenizer: Tokenizer) -> bytes:
    """Return a token's own bytes, also if its text is empty because its character is not complete; none if hidden."""
    data = visible_bytes(entry.token, tokenizer, shape.skip_special and entry.token not in shape.markers)
    return data if data or shape.tool is None else entry.text.encode()  # the marks of a calculator are special tokens


def _id_of(token: int, shape: ReplyShape) -> JSON:
    """Return the token's id if ids are requested; different tokens can have equal texts."""
    return {"token_id": token} if shape.token_ids else {}


def _alternatives(entry: LogprobEntry, name: Callable[[int], str], *, own_first: bool) -> JSON:
    """Return name -> log-probability of a token's alternatives; `own_first`: its own first, as in vLLM."""
    named = {name(one.token): one.logprob for one in entry.top or ()}
    own = name(entry.token)
    return {own: named[own], **named} if own_first and own in named else named


def _prompt_logprobs(sample: TrainingSample | None, shape: ReplyShape, tokenizer: Tokenizer) -> list[JSON | None]:
    """Return vLLM's form: None for the first token, then token id -> log-probability, rank and text."""
    if sample is None:
        return []
    scores = sample.prompt_logprobs or ()
    tops = sample.prompt_top_logprobs or ((),) * len(scores)
    text = cache(lambda token: token_text(token, tokenizer))
    rows: list[JSON | None] = [None]
    ranks = sample.prompt_ranks or (None,) * len(scores)
    for token, score, top, token_rank in zip(sample.prompt_tokens[1:], scores, tops, ranks, strict=True):
        row = {
            str(one.token): {"logprob": one.logprob, "rank": rank, "decoded_token": text(one.token)}
            for rank, one in enumerate(top[: shape.prompt_logprobs], start=1)
        }
        own = {"logprob": score, "rank": token_rank, "decoded_token": text(token)}
        rows.append({**row, **({} if str(token) in row else {str(token): own})})
    return rows


def _namer(shape: ReplyShape, tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a cached function that returns the name of an alternative token."""
    return cache(lambda token: f"token_id:{token}" if shape.tokens_as_ids else token_text(token, tokenizer))
