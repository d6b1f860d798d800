"""vLLM's POST /inference/v1/generate: token ids in, token ids out.

Fields and reply as in vllm/entrypoints/scale_out/token_in_token_out/protocol.py and vllm/sampling_params.py.
Extensions: `mask` (1 where the model sampled the token) and `stop_reason` in the reply, `return_raw_logprobs` and
`return_sampling_mask` in `sampling_params`, `answer_start`. Accepted and ignored: `include_stop_str_in_output`,
`output_kind` without streaming, `token_offsets` and `assistant_tokens_mask`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from nano_inference.server import schema
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry
from nano_inference.server.dialect import Dialect, Route
from nano_inference.server.errors import ApiError
from nano_inference.server.events import DONE, event
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import Reply, prompt_logprobs, sample_facts, token_facts, version_facts
from nano_inference.server.schema import Body, CompletionBody
from nano_inference.server.transcript import Transcript, usage
from nano_inference.server.translated import given_fields, translated
from nano_inference.types import SamplingParams


class GenerateParams(schema.SamplingFields):
    """vLLM's SamplingParams with vLLM's defaults; the model's recommended values are not applied."""

    n: schema.Samples | None = 1
    temperature: schema.Temperature | None = 1.0
    top_p: schema.PositiveShare | None = 1.0
    top_k: schema.CountOrOff | None = 0
    min_p: schema.Share | None = 0.0
    max_tokens: schema.Count | None = 16  # None: up to the end of the context
    min_tokens: schema.Count | None = 0
    presence_penalty: schema.Penalty | None = 0.0
    frequency_penalty: schema.Penalty | None = 0.0
    repetition_penalty: schema.Factor | None = 1.0
    logprobs: schema.AlternativesOrAll | None = None
    detokenize: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    output_kind: Literal[0, 1, 2] | None = None
    """0: all tokens so far, 1: new tokens, 2: only the final result. Streams support 1 only."""


class GenerateBody(Body):
    """POST /inference/v1/generate."""

    request_id: schema.Name | None = None
    model: Annotated[str, Field(max_length=512)] | None = None
    token_ids: schema.TokenIds
    sampling_params: GenerateParams | None = None
    stream: bool | None = None
    stream_options: schema.StreamOptions | None = None
    cache_salt: schema.Salt | None = None
    return_token_ids: bool | None = None  # include the prompt's ids in the reply
    answer_start: Annotated[int, Field(ge=1)] | None = None
    """The ids from here on are an answer: `prompt_logprobs` scores them as sampled with `sampling_params`."""
    token_offsets: list[Any] | None = None
    assistant_tokens_mask: list[Any] | None = None


_CLIENT_NAMES: Mapping[str, str] = {name: f"sampling_params.{name}" for name in GenerateParams.model_fields} | {
    "prompt": "token_ids"
}
"""Field of `CompletionBody` -> field of `GenerateBody`, for error messages."""


# ---- body -> generation


def ask_generate(body: GenerateBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body asks for. Raises `ApiError` naming the invalid field of `GenerateBody`."""
    params = body.sampling_params or GenerateParams()
    if body.stream and params.output_kind in (0, 2):
        message = "sampling_params.output_kind must be 1 (new tokens only) with stream=true"
        raise ApiError(400, message, param="sampling_params.output_kind")
    if params.stop and params.detokenize is False:
        raise ApiError(400, "sampling_params.stop needs detokenize to be true", param="sampling_params.stop")
    fields = {name: value for name, value in given_fields(params).items() if name in CompletionBody.model_fields}
    structure = {name: value for name, value in (params.structured_outputs or {}).items() if value not in (None, False)}
    fields |= {
        "model": body.model,
        "prompt": body.token_ids,
        "stream": body.stream,
        "stream_options": body.stream_options and body.stream_options.model_dump(exclude_none=True),
        "max_tokens": params.max_tokens,
        "structured_outputs": structure or None,
    }
    if params.skip_reading_prefix_cache:  # no other request has this namespace
        salt = f"{salt}#{uuid.uuid4().hex}"
    if body.answer_start is None:
        generation = translated(fields, CompletionBody, _CLIENT_NAMES, model, config, salt)
    else:
        _check_score(body, params)
        fields |= {"max_tokens": 0, "min_tokens": None}  # no room for an answer is needed
        generation = translated(fields, CompletionBody, _CLIENT_NAMES, model, config, salt)
        (request,) = generation.requests
        score = SamplingParams(max_tokens=0, prompt_logprobs=params.prompt_logprobs)
        sampled = replace(request.params, max_tokens=None, min_tokens=params.min_tokens or 0, prompt_logprobs=None)
        asked = replace(request, params=score, score_start=body.answer_start, score_params=sampled)
        generation = replace(generation, requests=(asked,))
    name, shown = body.request_id or f"generate-{uuid.uuid4().hex}", bool(body.return_token_ids)
    return replace(generation, id=name, names=frozenset({name}), token_ids=True, tokens_as_ids=True, options=shown)


def _check_score(body: GenerateBody, params: GenerateParams) -> None:
    """Raise `ApiError` for what an answer cannot be scored with."""
    assert body.answer_start is not None
    if params.prompt_logprobs is None:
        raise ApiError(400, "answer_start needs sampling_params.prompt_logprobs", param="answer_start")
    if body.answer_start >= len(body.token_ids):
        text = f"answer_start must be less than the number of token_ids, {len(body.token_ids)}; got {body.answer_start}"
        raise ApiError(400, text, param="answer_start")
    for name, is_given in {
        "structured_outputs": params.structured_outputs,
        "bad_words": params.bad_words,
        "n": (params.n or 1) > 1,
    }.items():
        if is_given:
            where = f"sampling_params.{name}"
            raise ApiError(400, f"{where} cannot be combined with answer_start", param=where)


# ---- reply


@dataclass
class GenerateReply(Reply[bool]):
    """The reply to /inference/v1/generate; the option is whether it has the prompt's ids."""

    _has_started: bool = field(init=False, default=False)  # True after the first chunk of a stream

    def whole(self) -> JSON:
        none: JSON = {"routed_experts": None, "sampling_mask": None}
        return {
            **self._head(),
            **self._prompt(),
            "choices": [
                self._choice(one.index, one, none | sample_facts(one, self.generation)) for one in self.transcripts
            ],
            "prompt_logprobs": prompt_logprobs(self.transcripts[0].sample, self.generation),
            "kv_transfer_params": None,
            "usage": usage(self.generation, self.transcripts),
        }

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        if not decoded.token_ids and decoded.finish_reason is None:
            return b""
        generation = self.generation
        facts: JSON = {"token_ids": [], "mask": [], **token_facts(decoded, generation)}
        if decoded.finish_reason is not None:
            facts |= version_facts(transcript, generation)
        prompt = {} if self._has_started else self._prompt()
        chunk = {**self._head(), **prompt, "choices": [self._choice(transcript.index, decoded, facts)]}
        self._has_started = True
        if generation.include_usage:
            so_far = usage(generation, self.transcripts, with_cached=False) if generation.continuous_usage else None
            chunk["usage"] = so_far
        return event(chunk)

    def end(self) -> bytes:
        if not self.generation.include_usage:
            return DONE
        return event({**self._head(), "choices": [], "usage": usage(self.generation, self.transcripts)}) + DONE

    def _head(self) -> JSON:
        generation = self.generation
        return {"request_id": generation.id, "model": generation.model, "created": generation.created}

    def _prompt(self) -> JSON:
        return {"prompt_token_ids": list(self.generation.requests[0].prompt)} if self.options else {}

    def _choice(self, index: int, part: Transcript | DecodedDelta, facts: JSON) -> JSON:
        """Return the choice of a sample, or of a delta: all of a sample's chunks add up to its choice."""
        count = self.generation.logprobs
        logprobs = None if count is None else {"content": [_logprobs(entry, count) for entry in part.entries]}
        reasons = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        return {"index": index, "logprobs": logprobs, **reasons, **facts}


def _logprobs(entry: LogprobEntry, count: int) -> JSON:
    tops = [_token(one.token, one.logprob, rank) for rank, one in enumerate((entry.top or ())[:count], start=1)]
    return {**_token(entry.token, entry.logprob, rank_of(entry, count)), "top_logprobs": tops}


def _token(token: int, logprob: float | None, rank: int | None) -> JSON:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": rank, "bytes": None}


def rank_of(entry: LogprobEntry, count: int) -> int | None:
    """Return the token's rank by probability, from 1; None if it is not among the `count` most likely."""
    top_tokens = [one.token for one in (entry.top or ())[:count]]
    return top_tokens.index(entry.token) + 1 if entry.token in top_tokens else None


_SUMMARY = "Complete token ids; the interface of vLLM's route for trainers."
DIALECT = Dialect(
    generating=(
        Route(
            path="/inference/v1/generate", body=GenerateBody, ask=ask_generate, reply=GenerateReply, summary=_SUMMARY
        ),
    )
)
