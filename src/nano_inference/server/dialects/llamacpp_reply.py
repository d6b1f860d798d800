"""llama.cpp's reply to /completion, whole or as a stream, and its error body."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry, token_bytes_of, token_text
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event
from nano_inference.server.replies import version_facts
from nano_inference.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """What a reply contains in addition to the answer."""

    settings: JSON
    """`generation_settings`."""
    tokens: bool
    timings: bool
    """Put timings into every event of a stream."""
    fields: tuple[str, ...]
    """Paths of the fields to send; empty: all."""


def error_body(error: ApiError) -> JSON:
    """Return llama.cpp's error object: `code` is the HTTP status, and a prompt that is too long has its own type."""
    is_long = error.code == "context_length_exceeded"
    kind = "exceed_context_size_error" if is_long else error.type
    return {"error": {"code": error.status, "message": shortened(error.message), "type": kind, **error.extra}}


@dataclass(slots=True)
class StreamProgress:
    """What a stream has sent of one sample, and the monotonic times of its first and last tokens."""

    num_tokens: int = 0
    has_newline: bool = False
    first: float | None = None
    last: float | None = None

    def add(self, decoded: DecodedDelta) -> None:
        """Count the text and tokens of a delta."""
        self.num_tokens += len(decoded.token_ids)
        self.has_newline |= "\n" in decoded.text
        if decoded.token_ids:
            self.last = time.monotonic()
            self.first = self.last if self.first is None else self.first


class LlamaReply(Reply):
    """The reply to /completion: an object for one answer, a list for several."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int, *, options: ReplyOptions) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._options = options
        self._started_at = time.monotonic()
        self._progress = [StreamProgress() for _ in range(call.total_samples)]

    def body(self, transcripts: Sequence[Transcript]) -> Any:
        answers = [self._answer(transcript) for transcript in transcripts]
        return answers if len(answers) > 1 else answers[0]

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return an event with the new text and, at the end of the sample, one with all remaining fields."""
        self._progress[transcript.index].add(decoded)
        data = event(self._chunk(transcript, decoded)) if decoded.text or decoded.token_ids else b""
        return data if decoded.finish_reason is None else data + event(self._answer(transcript))

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing: each sample has its own last event."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        return event(error_body(error))

    def _chunk(self, transcript: Transcript, decoded: DecodedDelta) -> JSON:
        chunk: JSON = {
            "index": transcript.index,
            "content": decoded.text,
            "tokens": list(decoded.token_ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._progress[transcript.index].num_tokens,
            "tokens_evaluated": len(self._prompt(transcript)),
        }
        if self._call.shape.logprobs is not None:
            chunk["completion_probabilities"] = self._probabilities(decoded.entries)
        if self._options.timings:
            chunk["timings"] = self._timings(transcript, self._progress[transcript.index].num_tokens)
        if self._call.shape.versions and decoded.delta is not None:
            chunk["mask"] = list(decoded.delta.mask)
        return chunk

    def _answer(self, transcript: Transcript) -> JSON:
        """Return a whole answer, or the last event of a stream, which has neither text nor ids."""
        shape, prompt, is_sent = self._call.shape, self._prompt(transcript), self._call.stream
        kind, word = stop_of(transcript)
        known = [token for token in prompt if token < self._tokenizer.vocab_size]
        answer: JSON = {
            "index": transcript.index,
            "content": "" if is_sent else transcript.text,
            "tokens": list(transcript.token_ids) if self._options.tokens and not is_sent else [],
            "id_slot": -1,
            "stop": True,
            "model": self._call.model,
            "tokens_predicted": len(transcript.token_ids),
            "tokens_evaluated": len(prompt),
            "generation_settings": self._options.settings,
            "prompt": self._tokenizer.decode(known, skip_special=False),
            "has_new_line": self._progress[transcript.index].has_newline if is_sent else "\n" in transcript.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": 0 if transcript.sample is None else transcript.sample.num_cached_tokens,
            "timings": self._timings(transcript, len(transcript.token_ids)),
        }
        if shape.logprobs is not None and not is_sent:
            answer["completion_probabilities"] = self._probabilities(transcript.entries)
        if shape.versions and self._options.tokens and not is_sent:
            answer["mask"] = list(transcript.mask)
        if shape.versions:
            answer |= version_facts(transcript, shape)
        return selected(answer, self._options.fields)

    def _prompt(self, transcript: Transcript) -> tuple[int, ...]:
        return tuple(self._call.requests[transcript.prompt_index].prompt)

    def _timings(self, transcript: Transcript, num_tokens: int) -> JSON:
        progress = self._progress[transcript.index]
        prompt_s = None if progress.first is None else progress.first - self._started_at
        answer_s = None if progress.first is None or progress.last is None else progress.last - progress.first
        cached = None if transcript.sample is None else transcript.sample.num_cached_tokens
        prefilled = None if cached is None else len(self._prompt(transcript)) - cached
        return {"cache_n": cached, **speeds("prompt", prefilled, prompt_s), **speeds("predicted", num_tokens, answer_s)}

    def _probabilities(self, entries: Sequence[LogprobEntry]) -> list[JSON]:
        count = self._call.shape.logprobs
        return [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(one.token, one.logprob) for one in (entry.top or ())[:count]],
            }
            for entry in entries
        ]

    def _token(self, token: int, logprob: float | None) -> JSON:
        data = list(token_bytes_of(token, self._tokenizer))
        return {"id": token, "token": token_text(token, self._tokenizer), "bytes": data, "logprob": logprob}


def stop_of(transcript: Transcript) -> tuple[str, str]:
    """Return llama.cpp's `stop_type` and `stopping_word`."""
    if transcript.finish_reason == "stop":
        return ("word", transcript.stop_reason) if isinstance(transcript.stop_reason, str) else ("eos", "")
    return ("limit" if transcript.finish_reason == "length" else "none"), ""


def speeds(name: str, count: int | None, seconds: float | None) -> JSON:
    """Return the fields of llama.cpp's timings for `count` tokens in `seconds`; unknown values are None."""
    is_known = count is not None and seconds is not None
    return {
        f"{name}_n": count,
        f"{name}_ms": None if seconds is None else seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if is_known and count and seconds is not None else None,
        f"{name}_per_second": count / seconds if is_known and count and seconds else None,
    }


def selected(answer: JSON, paths: Sequence[str]) -> JSON:
    """Return the answer's values at these `a/b` paths, by path; the whole answer if `paths` is empty."""
    if not paths:
        return answer
    found: JSON = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
