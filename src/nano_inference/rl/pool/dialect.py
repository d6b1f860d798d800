"""Requests and samples in the form of vLLM's POST /inference/v1/generate. Pure.

Of our own server's extensions, `mask` and `weight_versions` are read where a reply has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from nano_inference.types import (
    FROM_THE_PROMPT,
    BadRequest,
    Delta,
    EngineRequest,
    SamplingParams,
    TokenLogprob,
    TopLogprobs,
    TrainingSample,
)

JSON = dict[str, Any]
_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def request_json(request: EngineRequest, model: str, name: str) -> JSON:
    """Return the body; options that only our server has are left out unless they are used."""
    params = request.params
    more_fields: JSON = {"cache_salt": request.salt} if request.salt else {}
    if request.score_params is not None:
        more_fields["answer_start"] = request.score_start
        params = replace(request.score_params, prompt_logprobs=params.prompt_logprobs)
    seed = params.seed
    if seed is not None and seed >= 1 << 63:  # servers take signed seeds, which give the same draws
        seed -= 1 << 64
    fields: JSON = {name: getattr(params, name) for name in _PLAIN}
    fields |= {"n": request.num_samples, "logprobs": params.logprobs or 0, "seed": seed}
    more = {
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
        "allowed_token_ids": sorted(params.allowed_token_ids or ()),
        "stop_token_ids": sorted(params.stop_token_ids),
        "stop": list(params.stop),
        "logprob_token_ids": list(params.logprob_token_ids),
        "return_raw_logprobs": params.raw_logprobs,
        "return_sampling_mask": params.sampling_mask,
    }
    fields |= {name: value for name, value in more.items() if value}
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = params.prompt_logprobs
    body = {"model": model, "request_id": name, "token_ids": list(request.prompt), "sampling_params": fields}
    return body | more_fields


def plain_request(request: EngineRequest) -> EngineRequest:
    """Return what to ask a server without our extensions; `SampleBuilder` makes the sample of the original request.

    vLLM samples at least one token, and counts the sampled token among the most probable ones that it lists. Raises
    `BadRequest` for a score under other parameters than temperature 1.
    """
    params = request.params
    if request.score_params not in (None, SamplingParams(logprobs_mode="tempered")):
        raise BadRequest("params", "this server scores at temperature 1 without other options")
    if params.max_tokens == 0:
        params = replace(params, max_tokens=1, logprobs_mode=None)
    if params.logprobs:
        params = replace(params, logprobs=params.logprobs + 1)
    return replace(request, params=params, score_params=None)


def check_supported(request: EngineRequest) -> None:
    """Raise `BadRequest` naming a field that a worker at a URL cannot receive."""
    given = {
        "program": request.program is not None,
        "make_matcher": request.make_matcher is not None,
        "partial": request.partial is not None,
        "adapter": request.adapter is not None,
        "beginning": request.beginning != FROM_THE_PROMPT and request.score_params is None,
    }
    for name, is_given in given.items():
        if is_given:
            raise BadRequest(name, "workers at URLs do not support it; use engines in this process or Ray actors")
    params = request.params
    scored, plain = request.score_params or params, SamplingParams(logprobs_mode="tempered")
    if request.score_params is not None and scored.logprobs_mode is not None and scored != plain:
        if scored == replace(plain, temperature=scored.temperature):
            text = f"workers at URLs score at temperature 1, got {scored.temperature:g}; give it in params"
            raise BadRequest("temperature", text)
        raise BadRequest("params", "logprobs_mode: servers set it for all requests (--logprobs-mode)")
    is_prompt = request.score_params is None and params.prompt_logprobs is not None and params.max_tokens == 0
    if is_prompt and params.temperature != 1:
        raise BadRequest("temperature", f"workers at URLs score at temperature 1, got {params.temperature:g}")
    if params.logprob_token_ids and params.logprobs:
        raise BadRequest("logprobs", "workers at URLs report logprob_token_ids or the most probable tokens, not both")
    if params.logprobs_mode is not None and params.max_tokens != 0:
        raise BadRequest("logprobs_mode", "servers set it for all requests (--logprobs-mode)")


def samples_of(reply: JSON, request: EngineRequest, version: int) -> list[TrainingSample]:
    """Return the samples of a whole reply; `version` is that of servers which report none."""
    prompt = prompt_fields(reply.get("prompt_logprobs"), request)
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    found = []
    for choice in sorted(reply["choices"], key=lambda one: int(one["index"])):
        builder = SampleBuilder(request, choice["index"], version)
        builder.add(choice)
        found.append(builder.sample(choice, prompt, int(details.get("cached_tokens") or 0)))
    return found


class SampleBuilder:
    """Collects the parts of one sample."""

    def __init__(self, request: EngineRequest, index: int, version: int) -> None:
        self._request, self._index = request, index
        self._version = version
        self._deltas: list[Delta] = []

    def add(self, choice: Mapping[str, Any]) -> Delta:
        """Add the tokens of a reply's or a chunk's choice; return them, without the sample."""
        params = self._request.params
        if params.max_tokens == 0:  # a server that samples at least one token was asked for a score
            choice = {}
        tokens = tuple(choice.get("token_ids") or ())
        entries = (choice.get("logprobs") or {}).get("content") or []
        mask = tuple(choice.get("mask") or (1,) * len(tokens))
        masks = tuple(None if one is None else tuple(one) for one in choice.get("sampling_mask") or ())
        delta = Delta(
            request_id=0,
            sample_index=self._index,
            token_ids=tokens,
            logprobs=tuple(float(entry["logprob"] or 0.0) for entry in entries),
            mask=mask,
            versions=self._versions_of(choice, len(tokens)),
            top_logprobs=None if params.logprobs is None else tuple(_top(entry, params) for entry in entries),
            raw_logprobs=tuple(choice.get("raw_logprobs") or ()) if params.raw_logprobs else None,
            sampling_masks=masks if params.sampling_mask else None,
        )
        self._deltas.append(delta)
        return delta

    def sample(self, choice: Mapping[str, Any], prompt: Mapping[str, Any], num_cached: int = 0) -> TrainingSample:
        """Return the sample; `choice` is the last one, which has the finish reason."""
        params = self._request.params
        labels = {span["number"]: span["version"] for span in choice.get("weight_versions") or () if "number" in span}
        versions = self._joined("versions")
        return TrainingSample(
            request_id=0,
            sample_index=self._index,
            prompt_tokens=tuple(self._request.prompt),
            completion_tokens=self._joined("token_ids"),
            logprobs=self._joined("logprobs"),
            mask=self._joined("mask"),
            token_versions=versions,
            weight_version=min(versions, default=self._version),
            finish_reason="length" if params.max_tokens == 0 else choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            seed=params.seed,
            version_labels={number: label for number, label in labels.items() if label != str(number)},
            top_logprobs=None if params.logprobs is None else self._joined("top_logprobs"),
            raw_logprobs=self._joined("raw_logprobs") if params.raw_logprobs else None,
            sampling_masks=self._joined("sampling_masks") if params.sampling_mask else None,
            num_cached_tokens=num_cached,
            **prompt,
        )

    def _joined(self, name: str) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(getattr(delta, name) or () for delta in self._deltas))

    def _versions_of(self, choice: Mapping[str, Any], count: int) -> tuple[int, ...]:
        """Return the version of each token: from a chunk's list, or from a reply's spans."""
        if choice.get("token_versions") is not None:
            return tuple(choice["token_versions"])
        spans = choice.get("weight_versions")
        if spans is None or any(delta.token_ids for delta in self._deltas):
            return (self._version,) * count
        return tuple(span.get("number", self._version) for span in spans for _ in range(span["start"], span["end"]))


def prompt_fields(entries: Sequence[Mapping[str, Any] | None] | None, request: EngineRequest) -> JSON:
    """Return the fields of a sample about its prompt, if they were requested."""
    count = request.params.prompt_logprobs
    if entries is None or count is None:
        return {}
    first = max(request.score_start, 1)
    pairs = list(zip(request.prompt, entries, strict=True))[first:]
    own = [(entry or {})[str(token)] for token, entry in pairs]
    tops = [
        tuple(
            TokenLogprob(int(token), one["logprob"])
            for token, one in sorted((entry or {}).items(), key=lambda item: item[1]["rank"])
        )[:count]
        for _, entry in pairs
    ]
    return {"prompt_logprobs": tuple(one["logprob"] for one in own), "prompt_top_logprobs": tuple(tops)}


def _top(entry: Mapping[str, Any], params: SamplingParams) -> TopLogprobs:
    """Return the requested tokens, or the most probable ones; those of equal probability keep the server's order."""
    listed = entry.get("top_logprobs") or ()
    if not params.logprob_token_ids:
        listed = sorted(listed, key=lambda one: -float(one["logprob"]))[: params.logprobs]
    return tuple(TokenLogprob(_token_id(one), one["logprob"]) for one in listed)


def _token_id(entry: Mapping[str, Any]) -> int:
    """Return an entry's token; vLLM has its id in the text alone, as "token_id:7"."""
    return int(entry["token_id"] if "token_id" in entry else str(entry["token"]).removeprefix("token_id:"))
