"""SGLang's reply to /generate: an answer with its `meta_info`, whole, or as events that each say everything so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from nano_inference.server.call import JSON, Call, Transcript, transcripts_of
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry, token_text
from nano_inference.server.errors import ApiError
from nano_inference.server.events import DONE, events
from nano_inference.server.replies import version_facts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import SamplingMask, TopLogprobs

_OFTEN = 64
"""A stream's event says everything so far. When that is long, the next one waits for a 64th more of it: all events
together are then a fixed multiple of the reply, not its square."""


class Told(NamedTuple):
    """What the reply to one prompt tells."""

    rid: str
    logprobs: bool
    start: int
    """First token of the prompt whose log-probability is told; -1 tells of none."""
    top: int
    """Alternatives of each token."""


def next_event(num_tokens: int) -> int:
    """Return with how many tokens a stream tells of a sample again."""
    return num_tokens + max(1, num_tokens // _OFTEN)


def follow(seen: Transcript, decoded: DecodedDelta) -> None:
    """Add to what a stream has told of a sample. Its own draft may be ahead of that by several deltas."""
    seen.text += decoded.text
    seen.token_ids += decoded.token_ids
    seen.entries += decoded.entries
    seen.finish_reason, seen.stop_reason = decoded.finish_reason, decoded.stop_reason
    if decoded.delta is not None:
        seen.mask += decoded.delta.mask
        seen.versions += decoded.delta.versions
        seen.sample = decoded.delta.sample


class SglangReply:
    """The reply to /generate: an object for one prompt, a list for several or for several samples."""

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        created: int,
        *,
        told: Sequence[Told],
        is_list: bool,
        with_text: bool,
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._told = told
        self._is_list = is_list
        self._with_text = with_text
        self._began = time.monotonic()
        self._seen = transcripts_of(call)
        """What a stream has told."""
        self._masks: list[list[SamplingMask]] = [[] for _ in self._seen]
        self._next = [1] * call.total_samples
        """Tokens with which there is another event."""

    def body(self, transcripts: Sequence[Transcript]) -> Any:
        """Return the reply's JSON."""
        answers = [self._answer(transcript, _masks(transcript)) for transcript in transcripts]
        return answers if self._is_list else answers[0]

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing: a stream begins with the first tokens."""
        return b""

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return an event with everything so far of one sample, when it is time for one."""
        index, seen = transcript.index, self._seen[transcript.index]
        follow(seen, decoded)
        if decoded.delta is not None:
            self._masks[index] += decoded.delta.sampling_masks or ()
        count = len(seen.token_ids)
        if seen.finish_reason is None and count < self._next[index]:
            return b""
        self._next[index] = next_event(count)
        answer = self._answer(seen, self._masks[index])
        return events([{**answer, "index": index} if self._is_list else answer])

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return [DONE]."""
        return DONE

    def error_events(self, error: ApiError) -> bytes:
        """Return the error, and [DONE]."""
        return events([error.to_dict()]) + DONE

    def _answer(self, transcript: Transcript, masks: Sequence[SamplingMask]) -> JSON:
        told = self._told[transcript.prompt_index]
        meta = self._meta(transcript, told)
        if told.logprobs:
            meta |= self._logprobs(transcript.entries, told)
        if told.start >= 0:
            meta |= self._input_logprobs(transcript, told)
        if self._call.shape.sampling_masks:
            meta["sampling_mask"] = list(masks)
        return {"text": transcript.text, "output_ids": list(transcript.token_ids), "meta_info": meta}

    def _meta(self, transcript: Transcript, told: Told) -> JSON:
        sample, several = transcript.sample, self._call.num_samples
        return {
            "id": told.rid if several == 1 else f"{told.rid}_{transcript.index % several}",
            "finish_reason": finish_of(transcript),
            "prompt_tokens": len(self._call.requests[transcript.prompt_index].prompt),
            "completion_tokens": len(transcript.token_ids),
            "cached_tokens": sample.num_cached_tokens if sample is not None else 0,
            "num_retractions": sample.num_preemptions if sample is not None else 0,
            "weight_version": weight_version(transcript),
            **version_facts(transcript, self._call.shape),
            "mask": list(transcript.mask),
            "e2e_latency": time.monotonic() - self._began,
        }

    def _logprobs(self, entries: Sequence[LogprobEntry], told: Told) -> JSON:
        facts: JSON = {"output_token_logprobs": [self._triple(one.logprob, one.token) for one in entries]}
        if told.top:
            facts["output_top_logprobs"] = [self._triples(one.top or (), told.top) for one in entries]
        return facts

    def _input_logprobs(self, transcript: Transcript, told: Told) -> JSON:
        """Return those of the prompt; the first that is told of has none, as in SGLang."""
        sample = transcript.sample
        if sample is None:
            return {}
        scores: list[float | None] = [None, *(sample.prompt_logprobs or ())]
        tokens = sample.prompt_tokens
        rest = range(told.start + 1, len(tokens))
        first = [self._triple(None, tokens[told.start])] if told.start < len(tokens) else []
        facts: JSON = {"input_token_logprobs": [*first, *(self._triple(scores[at], tokens[at]) for at in rest)]}
        if told.top:
            tops: Sequence[TopLogprobs] = ((), *(sample.prompt_top_logprobs or ()))
            facts["input_top_logprobs"] = [None for _ in first] + [self._triples(tops[at], told.top) for at in rest]
        return facts

    def _triples(self, top: TopLogprobs, count: int) -> list[list[Any]]:
        return [self._triple(one.logprob, one.token) for one in top[:count]]

    def _triple(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, token_text(token, self._tokenizer) if self._with_text else None]


def finish_of(transcript: Transcript) -> JSON | None:
    """Return why a sample ended, as SGLang says it; None while it goes on."""
    match transcript.finish_reason:
        case None:
            return None
        case "stop":
            matched = transcript.token_ids[-1] if transcript.stop_reason is None else transcript.stop_reason
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": len(transcript.token_ids)}
        case _:
            return {"type": "abort", "message": "the request was aborted"}


def weight_version(transcript: Transcript) -> str:
    """Return the oldest weights that drew a sample's tokens: their trainer's name, or how many there had been."""
    if transcript.sample is not None:
        number = transcript.sample.weight_version
        return str(transcript.sample.version_labels.get(number, number))
    return str(min(transcript.versions)) if transcript.versions else ""


def _masks(transcript: Transcript) -> Sequence[SamplingMask]:
    return () if transcript.sample is None else transcript.sample.sampling_masks or ()
