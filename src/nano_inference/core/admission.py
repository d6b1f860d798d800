"""Checks callers' requests and starts their sequences. Errors reach callers as `BadRequest`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from nano_inference.config import EngineConfig
from nano_inference.core.adapters import Adapters
from nano_inference.core.seeds import derive_seed
from nano_inference.core.sequence import Sequence, start_sequences
from nano_inference.support.checks import check_int, token_ids
from nano_inference.types import (
    BadRequest,
    Beginning,
    EngineRequest,
    MatcherFactory,
    SamplingParams,
    TokenProgram,
    TrainingSample,
)

StopMatcherFactory = Callable[[tuple[str, ...]], MatcherFactory]
"""Returns a factory of matchers for these stop strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of an engine that a request must respect."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    hidden_size: int = 0
    """Size of an embedding; 0 if unknown."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end tokens, which stop a request unless it ignores them."""
    media_token_ids: Mapping[int, str] = field(default_factory=dict)  # tokens of images, with their fields
    caches_by_prompt: bool = False
    """Whether K/V depends on the prompt's length, so that only prompts of equal length share cached prefixes."""
    lineage: str | None = None
    """See `TrainingSample.lineage`."""


class Admission:
    """Owns the counters of request and sequence ids."""

    def __init__(self, config: EngineConfig, limits: Limits, stop_matcher: StopMatcherFactory | None) -> None:
        """`stop_matcher` is None without a tokenizer."""
        self.limits = limits
        self._config = config
        self._stop_matcher = stop_matcher
        self._next_request = 0
        self._next_sequence = 0

    def admit_all(
        self, requests: Seq[EngineRequest], version: int, adapters: Adapters, prefixes: Seq[str] = ()
    ) -> list[list[Sequence]]:
        """Return the sequences of every request, all or none; `take` uses their ids. Raises `BadRequest`.

        `version` is that of the weights; `prefixes` holds the field of each request for its error message.
        """
        admitted: list[list[Sequence]] = []
        next_sequence = self._next_sequence
        for index, request in enumerate(requests):
            try:
                sequences = self._admit(request, self._next_request + index, next_sequence, version, adapters)
            except ValueError as error:  # a `BadRequest`, or from the request's matcher or program
                field = error.field if isinstance(error, BadRequest) else ""
                cause = None if isinstance(error, BadRequest) else error
                begin = f"{prefixes[index]}: " if prefixes else ""
                raise BadRequest(prefixes[index] if prefixes else field, f"{begin}{error}") from cause
            admitted.append(sequences)
            next_sequence += len(sequences)
        return admitted

    def take(self, sequences: list[Sequence]) -> int:
        """Use the ids of an admitted request, so that no other gets them; return the request's."""
        self._next_request = sequences[0].request_id + 1
        self._next_sequence = sequences[-1].id + 1
        return sequences[0].request_id

    def _admit(
        self, request: EngineRequest, request_id: int, first_id: int, version: int, adapters: Adapters
    ) -> list[Sequence]:
        request, max_new_tokens = checked(request, self.limits, self._stop_matcher)
        newest = -1 if request.partial is None else max(request.partial.token_versions, default=-1)
        if newest > version:
            raise BadRequest("partial", f"has tokens of weight version {newest}, this engine's is {version}")
        return start_sequences(
            request,
            request_id=request_id,
            first_id=first_id,
            seed=self._seed_of(request, request_id),
            max_new_tokens=max_new_tokens,
            eos_token_ids=self.limits.eos_token_ids,
            logprobs_mode=self._config.logprobs_mode,
            lineage=self.limits.lineage,
            adapter=adapters.number_of(request.adapter),
        )

    def _seed_of(self, request: EngineRequest, request_id: int) -> int:
        """Return the seed of the request, of its partial sample, derived from the engine's, or fresh entropy."""
        if request.params.seed is not None:
            return request.params.seed
        if request.partial is not None and request.partial.seed is not None:
            return request.partial.seed
        if self._config.seed is not None:
            return derive_seed(self._config.seed, request_id)
        return secrets.randbits(64)


def checked(
    request: EngineRequest, limits: Limits, stop_matcher: StopMatcherFactory | None = None
) -> tuple[EngineRequest, int]:
    """Return the request with its final ids, salt and matcher, and its most new tokens.

    `stop_matcher` makes matchers of stop strings; None without a tokenizer. Raises `BadRequest` naming the field and
    the limit.
    """
    if not isinstance(request, EngineRequest):
        raise BadRequest("request", f"must be an EngineRequest, got {type(request).__name__}")
    params = request.params
    if not isinstance(params, SamplingParams):
        raise BadRequest("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
    make_matcher = request.make_matcher
    if params.stop and make_matcher is not None:
        raise BadRequest("stop", "give stop strings or a matcher, not both")
    if params.stop and stop_matcher is not None:
        make_matcher = stop_matcher(tuple(params.stop))
    ids = check_fields(request, limits)
    max_new = room_for(len(ids), params, limits)
    if request.partial is not None:
        check_partial(request, ids, max_new, limits)
    if params.stop and make_matcher is None:
        raise BadRequest("stop", "this engine was made without a tokenizer; use stop_token_ids or pass a matcher")
    if request.score_params is not None:
        request = replace(request, beginning=Beginning(max(0, len(ids) - request.score_start)))
    salt = f"{request.salt}\n{len(ids) - request.beginning.num_tokens}" if limits.caches_by_prompt else request.salt
    return replace(request, prompt=ids, salt=salt, make_matcher=make_matcher), max_new


def check_fields(request: EngineRequest, limits: Limits) -> tuple[int, ...]:
    """Return the prompt's ids. Raises `ValueError` naming the first field that is invalid for this model."""
    if not isinstance(request.salt, str):
        raise BadRequest("salt", f"must be a string, got {request.salt!r}")
    ids = check_prompt(request.prompt, limits)
    check_int("num_samples", request.num_samples, 1)
    check_int("score_start", request.score_start, 0)
    if not isinstance(request.beginning, Beginning):
        raise BadRequest("beginning", f"must be a Beginning, got {type(request.beginning).__name__}")
    check_int("beginning.num_tokens", request.beginning.num_tokens, 0, len(ids))
    check_int("beginning.sample_index", request.beginning.sample_index, 0)
    if request.params.pooling is not None and request.num_samples != 1:
        raise BadRequest("num_samples", f"must be 1 with pooling, got {request.num_samples}")
    check_tokens(request.params, limits)
    if request.score_params is not None:
        if not isinstance(request.score_params, SamplingParams):
            raise BadRequest("params", f"must be SamplingParams, got {type(request.score_params).__name__}")
        check_tokens(request.score_params, limits)
    return ids


def check_partial(request: EngineRequest, prompt: tuple[int, ...], max_new: int, limits: Limits) -> None:
    """Raise `ValueError` if the sample cannot be resumed: ended, of another prompt, or without requested fields.

    Nor can one of another lineage: there, equal weight versions mean different weights.
    """
    partial, params = request.partial, request.params
    if not isinstance(partial, TrainingSample):
        raise BadRequest("partial", f"must be a TrainingSample, got {type(partial).__name__}")
    if request.num_samples != 1:
        raise BadRequest("num_samples", f"must be 1 with partial, got {request.num_samples}")
    if partial.prompt_tokens != prompt:
        raise BadRequest("partial", "its prompt_tokens differ from the prompt")
    if partial.adapter != request.adapter:
        raise BadRequest("partial", f"was computed with the adapter {partial.adapter}, requested is {request.adapter}")
    for name in ("completion_tokens", "mask"):
        token_ids(f"partial: {name}", getattr(partial, name))
    size = limits.vocab_size
    if max(partial.completion_tokens, default=0) >= size or max(partial.mask, default=0) > 1:
        raise BadRequest("partial", f"holds a token outside the vocabulary of {size}, or a mask that is not 0 or 1")
    if not all(math.isfinite(logprob) for logprob in partial.logprobs):
        raise BadRequest("partial", "its logprobs are not all finite")
    if partial.finish_reason == "stop":
        raise BadRequest("partial", "ended with a stop and cannot be resumed")
    if len(partial.completion_tokens) >= max_new:
        raise BadRequest("partial", f"has {len(partial.completion_tokens)} tokens already, max_tokens is {max_new}")
    wanted = {
        "raw_logprobs": params.raw_logprobs,
        "sampling_masks": params.sampling_mask,
        "top_logprobs": params.logprobs is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted and getattr(partial, name) is None:
            raise BadRequest("partial", f"has no {name}, which the parameters request")
    if partial.lineage not in (None, limits.lineage) and partial.completion_tokens:
        raise BadRequest(
            "partial",
            f"its lineage is {partial.lineage!r}, this engine's is {limits.lineage!r}, and their weight "
            "versions are unrelated; resume it on its own engine, or give all engines of a pool the same "
            "EngineConfig.lineage",
        )


def check_prompt(prompt: Seq[int], limits: Limits) -> tuple[int, ...]:
    """Return the prompt as a tuple. Raises `ValueError` if it is empty or has an id that the model does not take."""
    ids = token_ids("prompt", prompt)
    if not ids:
        raise BadRequest("prompt", "must hold at least one token")
    for i, token in enumerate(ids if limits.media_token_ids or max(ids) >= limits.vocab_size else ()):
        if token >= limits.vocab_size:
            raise BadRequest(
                "prompt", f"token id {token} at position {i} is outside the vocabulary of {limits.vocab_size}"
            )
        if token in limits.media_token_ids:
            media = f"the model's {limits.media_token_ids[token]}: images and videos are not supported"
            raise BadRequest("prompt", f"token id {token} at position {i} is {media}")
    return ids


def check_tokens(params: SamplingParams, limits: Limits) -> None:
    """Raise `ValueError` for a token outside the vocabulary, or if `min_tokens` bans every allowed token."""
    allowed = params.allowed_token_ids or ()
    named = {"stop_token_ids": params.stop_token_ids, "allowed_token_ids": allowed, "logit_bias": params.logit_bias}
    named["logprob_token_ids"] = params.logprob_token_ids
    for name, ids in named.items():
        for token in ids:
            if token >= limits.vocab_size:
                raise BadRequest(name, f"token id {token} is outside the vocabulary of {limits.vocab_size}")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            check_int(name, count, 0, limits.vocab_size)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else limits.eos_token_ids)
    if params.min_tokens and allowed and set(allowed) <= stops:
        raise BadRequest(
            "min_tokens",
            "every one of allowed_token_ids is a stop token or an end token of the model, so no token could be sampled",
        )


def room_for(num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    """Return the most tokens to add. Raises `ValueError` if the model or the whole cache is too small."""
    wanted = params.max_tokens
    shortest = num_prompt + (0 if wanted == 0 else 1)
    if shortest > limits.max_model_len:
        raise BadRequest(
            "prompt",
            f"prompt has {num_prompt} tokens; max_model_len is {limits.max_model_len}"
            + ("" if wanted == 0 else ", the answer included"),
        )
    num_slots = limits.num_blocks * limits.block_size
    room = min(limits.max_model_len, num_slots) - num_prompt
    max_new = room if wanted is None else min(wanted, limits.max_model_len - num_prompt)
    if num_prompt + max_new > num_slots or (wanted is None and room < 1):
        raise BadRequest(
            "prompt",
            f"prompt of {num_prompt} tokens and max_tokens of {wanted} need more than the whole KV cache, "
            f"which holds {num_slots} tokens; lower max_tokens or raise kv_cache_bytes",
        )
    return max_new


def texts_of(token_ids: Seq[int] | Seq[Seq[int]]) -> tuple[Seq[Seq[int]], bool]:
    """Return a list of texts, and whether a single text was given. Raises `BadRequest`."""
    if not isinstance(token_ids, list | tuple) or not token_ids:
        raise BadRequest("token_ids", "must be a list of token ids, or a list of such lists, and not empty")
    single = isinstance(token_ids[0], int)
    texts: Seq[Seq[int]] = [token_ids] if single else token_ids
    return texts, single


def score_starts(start: int | Seq[int], count: int) -> Seq[int]:
    """Return one start position for each text. Raises `BadRequest`."""
    starts = [start] * count if isinstance(start, int) else start
    if not isinstance(starts, list | tuple) or len(starts) != count:
        raise BadRequest("start", f"must be an integer, or one for each of {count} texts, got {start!r}")
    for one in starts:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise BadRequest("start", f"must be an integer >= 0, got {one!r}")
    return starts


def requests_for(
    prompts: Seq[Seq[int]],
    sampling_params: SamplingParams | Seq[SamplingParams] | None,
    num_samples: int = 1,
    program: TokenProgram | None = None,
    adapter: str | None = None,
) -> list[EngineRequest]:
    """Return a request for each prompt, with the one `SamplingParams` or its own. Raises `BadRequest`."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, list | tuple):
        raise BadRequest("prompts", f"must be a list of lists of token ids, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int):
        raise BadRequest("prompts", "must be a list of lists of token ids, got one list of ids; wrap it in a list")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise BadRequest("sampling_params", f"{len(sampling_params)} given for {len(prompts)} prompts")
    return [
        EngineRequest(prompt=prompt, params=params, num_samples=num_samples, program=program, adapter=adapter)
        for prompt, params in zip(prompts, sampling_params, strict=True)
    ]


def scoring_requests(
    texts: Seq[Seq[int]],
    start: int | Seq[int],
    temperature: float,
    params: SamplingParams | Seq[SamplingParams] | None,
    adapter: str | None = None,
) -> list[EngineRequest]:
    """Return the requests that compute the log-probabilities of texts from `start` on. Raises `BadRequest`.

    Tokens from a start above 0 are an answer, sampled with `params`, or with `temperature` alone.
    """
    starts = score_starts(start, len(texts))
    tempered = SamplingParams(temperature=temperature, logprobs_mode="tempered")
    if params is None:
        sampled: Seq[SamplingParams] = [tempered] * len(texts)
    elif temperature != 1:
        raise BadRequest("temperature", "give it in params, which are given too")
    elif 0 in starts:
        raise BadRequest("start", "must be at least 1 with params: the tokens before it are the prompt")
    else:
        sampled = [params] * len(texts) if isinstance(params, SamplingParams) else params
        if not isinstance(sampled, list | tuple) or len(sampled) != len(texts):
            raise BadRequest("params", f"must be SamplingParams, or a list of them for {len(texts)} texts")
    return [
        EngineRequest(
            prompt=ids,
            params=replace(tempered, max_tokens=0, prompt_logprobs=0),
            score_start=begin,
            score_params=one if begin else None,
            adapter=adapter,
        )
        for ids, begin, one in zip(texts, starts, sampled, strict=True)
    ]
