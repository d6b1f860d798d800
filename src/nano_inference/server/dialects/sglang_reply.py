"""SGLang's reply to /generate, whole or as a stream whose events each contain all text so far."""

from __future__ import annotations

import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

from nano_inference.server.call import JSON, Call, Reply, Transcript, transcripts_of
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry, token_text
from nano_inference.server.events import events
from nano_inference.server.replies import version_facts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import SamplingMask, TopLogprobs

_GROWTH_DIVISOR = 64
"""Every event contains all text so far, so a long answer's next event waits until it has grown by 1/64. The bytes of
all events are then linear in the length of the answer, not quadratic."""


class PromptOptions(NamedTuple):
    """What the reply to one prompt contains."""

    rid: str
    logprobs: bool
    start: int  # first prompt token with a log-probability; -1: none
    top: int  # alternatives of each token
    named: tuple[int, ...]  # tokens reported at each position of the output, in addition to the alternatives
    kept: bool  # whether the tokens that could be sampled are included in slime's form


def next_event(num_tokens: int) -> int:
    """Return the number of tokens at which the event after `num_tokens` is sent."""
    return num_tokens + max(1, num_tokens // _GROWTH_DIVISOR)


class SglangReply(Reply):
    """The reply to /generate: an object for one prompt, a list for several or for several samples."""

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        created: int,
        *,
        options: Sequence[PromptOptions],
        is_list: bool,
        with_text: bool,
        with_masks: bool,
        vocab_size: int,
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._options = options
        self._is_list = is_list
        self._with_text = with_text
        self._with_masks = with_masks
        self._vocab_size = vocab_size
        self._started_at = time.monotonic()
        self._sent = transcripts_of(call)
        """What a stream has sent; the transcripts passed to `delta_events` may be ahead by several deltas."""
        self._masks: list[list[SamplingMask]] = [[] for _ in self._sent]
        self._next = [1] * call.total_samples  # number of tokens of each sample at which its next event is sent

    def body(self, transcripts: Sequence[Transcript]) -> Any:
        answers = [self._answer(transcript, _masks(transcript)) for transcript in transcripts]
        return answers if self._is_list else answers[0]

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return an event with all of one sample so far, or nothing if its next event is not due."""
        index, sent = transcript.index, self._sent[transcript.index]
        sent.append(decoded)
        if decoded.delta is not None:
            self._masks[index] += decoded.delta.sampling_masks or ()
        count = len(sent.token_ids)
        if sent.finish_reason is None and count < self._next[index]:
            return b""
        self._next[index] = next_event(count)
        answer = self._answer(sent, self._masks[index])
        return events([{**answer, "index": index} if self._is_list else answer])

    def _answer(self, transcript: Transcript, masks: Sequence[SamplingMask]) -> JSON:
        options = self._options[transcript.prompt_index]
        meta = self._meta(transcript, options.rid)
        if options.logprobs:
            meta |= self._logprobs(transcript.entries, options)
        if options.start >= 0:
            meta |= self._input_logprobs(transcript, options)
        if self._with_masks:
            meta["sampling_mask"] = list(masks)
        if options.kept and transcript.finish_reason is not None:
            meta |= kept_tokens(masks, self._vocab_size)
        return {"text": transcript.text, "output_ids": list(transcript.token_ids), "meta_info": meta}

    def _meta(self, transcript: Transcript, rid: str) -> JSON:
        sample, num_samples = transcript.sample, self._call.num_samples
        return {
            "id": rid if num_samples == 1 else f"{rid}_{transcript.index % num_samples}",
            "finish_reason": finish_of(transcript),
            "prompt_tokens": len(self._call.requests[transcript.prompt_index].prompt),
            "completion_tokens": len(transcript.token_ids),
            "cached_tokens": sample.num_cached_tokens if sample is not None else 0,
            "num_retractions": sample.num_preemptions if sample is not None else 0,
            "weight_version": weight_version(transcript),
            **version_facts(transcript, self._call.shape),
            "mask": list(transcript.mask),
            "e2e_latency": time.monotonic() - self._started_at,
        }

    def _logprobs(self, entries: Sequence[LogprobEntry], options: PromptOptions) -> JSON:
        fields: JSON = {"output_token_logprobs": [self._triple(one.logprob, one.token) for one in entries]}
        num_named = len(options.named)  # their entries precede the alternatives
        if options.top:
            tops = [(one.top or ())[num_named:] for one in entries]
            fields["output_top_logprobs"] = [self._triples(top, options.top) for top in tops]
        if num_named:
            found = [one.top or () for one in entries]  # a forced token has none
            named = [top if len(top) >= num_named else () for top in found]
            fields["output_token_ids_logprobs"] = [self._triples(top, num_named) for top in named]
        return fields

    def _input_logprobs(self, transcript: Transcript, options: PromptOptions) -> JSON:
        """Return the prompt's log-probabilities; the first entry is None, as in SGLang."""
        sample = transcript.sample
        if sample is None:
            return {}
        scores: list[float | None] = [None, *(sample.prompt_logprobs or ())]
        tokens, start = sample.prompt_tokens, options.start
        rest = range(start + 1, len(tokens))
        first = [self._triple(None, tokens[start])] if start < len(tokens) else []
        fields: JSON = {"input_token_logprobs": [*first, *(self._triple(scores[at], tokens[at]) for at in rest)]}
        if options.top:
            tops: Sequence[TopLogprobs] = ((), *(sample.prompt_top_logprobs or ()))
            fields["input_top_logprobs"] = [None for _ in first] + [self._triples(tops[at], options.top) for at in rest]
        return fields

    def _triples(self, top: TopLogprobs, count: int) -> list[list[Any]]:
        return [self._triple(one.logprob, one.token) for one in top[:count]]

    def _triple(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, token_text(token, self._tokenizer) if self._with_text else None]


def kept_tokens(masks: Sequence[SamplingMask], vocab_size: int) -> JSON:
    """Return the ids that could be sampled at each position, joined, and where each position's ids end.

    Both are base64 of little-endian int32, the form of slime's patch of SGLang (docker/patch/latest/sglang-top_p.patch
    of 624b824); like it, returns nothing if no token was left out anywhere. Forced tokens have no ids.
    """
    if all(mask is None for mask in masks):
        return {}
    ids, offsets = array("i"), array("i", [0])
    for mask in masks:
        ids.extend(range(vocab_size) if mask is None else mask)
        offsets.append(len(ids))
    return {"top_p_token_ids": _int32(ids), "top_p_token_offsets": _int32(offsets)}


def _int32(values: array[int]) -> str:
    assert values.itemsize == 4, "a C int has 32 bits on every platform that is supported"
    if sys.byteorder == "big":
        values.byteswap()
    return b64encode(values.tobytes()).decode()


def finish_of(transcript: Transcript) -> JSON | None:
    """Return SGLang's `finish_reason`; None if the sample has not ended."""
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
    """Return the oldest weight version of a sample's tokens: the trainer's label, or else the version's number."""
    if transcript.sample is not None:
        number = transcript.sample.weight_version
        return str(transcript.sample.version_labels.get(number, number))
    return str(min(transcript.versions)) if transcript.versions else ""


def _masks(transcript: Transcript) -> Sequence[SamplingMask]:
    return () if transcript.sample is None else transcript.sample.sampling_masks or ()
