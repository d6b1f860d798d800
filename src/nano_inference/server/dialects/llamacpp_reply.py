"""llama.cpp's reply to /completion, whole or as a stream, and its error body."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry, token_bytes_of, token_text
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event
from nano_inference.server.replies import version_facts
from nano_inference.server.timings import PrefillProgress, timings_of
from nano_inference.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """What a reply contains in addition to the answer."""

    settings: Callable[[Call], JSON]  # returns `generation_settings`
    tokens: bool
    timings: bool  # put timings into every event of a stream
    probs: bool  # return probabilities after truncation (`prob`), not log-probabilities
    fields: tuple[str, ...]  # paths of the fields to send; empty: all


def stream_error(error: ApiError) -> bytes:
    """Return the event that ends a stream with an error."""
    return event(error_body(error))


def error_body(error: ApiError) -> JSON:
    """Return llama.cpp's error object: `code` is the HTTP status, and a prompt that is too long has its own type."""
    is_long = error.code == "context_length_exceeded"
    kind = "exceed_context_size_error" if is_long else error.type
    return {"error": {"code": error.status, "message": shortened(error.message), "type": kind, **error.extra}}


@dataclass(slots=True)
class StreamProgress:
    """What a stream has sent of one sample."""

    num_tokens: int = 0
    has_newline: bool = False

    def add(self, decoded: DecodedDelta) -> None:
        """Count the text and tokens of a delta."""
        self.num_tokens += len(decoded.token_ids)
        self.has_newline |= "\n" in decoded.text


_NOTHING = DecodedDelta("", (), (), None, None)


class LlamaReply(Reply):
    """The reply to /completion: an object for one answer, a list for several."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int, *, options: ReplyOptions) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._options = options
        self._settings = options.settings(call)
        self._prefill = PrefillProgress(call)
        self._progress = [StreamProgress() for _ in range(call.total_samples)]

    def body(self, transcripts: Sequence[Transcript]) -> Any:
        answers = [self._answer(transcript) for transcript in transcripts]
        return answers if len(answers) > 1 else answers[0]

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return an event with the new text and, at the end of the sample, one with all remaining fields."""
        self._progress[transcript.index].add(decoded)
        data = b"".join(
            event(self._chunk(transcript, _NOTHING) | {"prompt_progress": report})
            for report in self._prefill.reports(transcript, decoded)
        )
        data += event(self._chunk(transcript, decoded)) if decoded.text or decoded.token_ids else b""
        return data if decoded.finish_reason is None else data + event(self._answer(transcript))

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing: each sample has its own last event."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        return stream_error(error)

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
            chunk["timings"] = timings_of(self._call, transcript, self._progress[transcript.index].num_tokens)
        if self._call.shape.versions and decoded.delta is not None:
            chunk["mask"] = list(decoded.delta.mask)
        return chunk

    def _answer(self, transcript: Transcript) -> JSON:
        """Return a whole answer, or the last event of a stream, which has neither text nor ids."""
        shape, prompt, is_sent = self._call.shape, self._prompt(transcript), self._call.stream
        kind, word = stop_of(transcript)
        limit = self._call.requests[transcript.prompt_index].params.max_tokens
        is_short = limit is None or len(transcript.token_ids) < limit  # the end of the context ended the answer
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
            "generation_settings": self._settings,
            "prompt": self._tokenizer.decode(known, skip_special=False),
            "has_new_line": self._progress[transcript.index].has_newline if is_sent else "\n" in transcript.text,
            "truncated": transcript.finish_reason == "length" and is_short,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": 0 if transcript.sample is None else transcript.sample.num_cached_tokens,
            "timings": timings_of(self._call, transcript, len(transcript.token_ids)),
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

    def _probabilities(self, entries: Sequence[LogprobEntry]) -> list[JSON]:
        count = self._call.shape.logprobs
        return [
            {
                **self._token(entry.token, entry.logprob, entry.token),
                "top_probs" if self._options.probs else "top_logprobs": [
                    self._token(one.token, one.logprob, entry.token) for one in (entry.top or ())[:count]
                ],
            }
            for entry in entries
        ]

    def _token(self, token: int, logprob: float | None, drawn: int) -> JSON:
        """Return an alternative at the position of the token `drawn`."""
        data = list(token_bytes_of(token, self._tokenizer))
        entry: JSON = {"id": token, "token": token_text(token, self._tokenizer), "bytes": data}
        if self._options.probs and self._call.requests[0].params.temperature == 0:
            return entry | {"prob": float(token == drawn)}  # log-probabilities are then those of the logits
        if self._options.probs:
            return entry | {"prob": math.exp(logprob or 0.0)}
        return entry | {"logprob": logprob}


def stop_of(transcript: Transcript) -> tuple[str, str]:
    """Return llama.cpp's `stop_type` and `stopping_word`."""
    if transcript.finish_reason == "stop":
        return ("word", transcript.stop_reason) if isinstance(transcript.stop_reason, str) else ("eos", "")
    return ("limit" if transcript.finish_reason == "length" else "none"), ""


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
