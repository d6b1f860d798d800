"""SGLang's POST /generate and GET /health_generate.

Fields and reply as in sglang/srt/managers/io_struct.py and sglang/srt/sampling/sampling_params.py. Extension: `mask` in
`meta_info` (1 where the model sampled the token). `output_ids` includes the stop token.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Annotated, Any, TypeVar

from pydantic import Field

from nano_inference.server.call import JSON, Call
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Dialect, Generating, Probing
from nano_inference.server.dialects.sglang_reply import PromptOptions, SglangReply
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import (
    MAX_BIAS,
    MAX_NAMED,
    MAX_PROMPTS,
    Alternatives,
    Bias,
    Body,
    CompletionBody,
    Count,
    CountOrOff,
    Factor,
    Name,
    Penalty,
    PositiveShare,
    Salt,
    Samples,
    Seed,
    Share,
    Stops,
    Temperature,
    TokenId,
    TokenIds,
)
from nano_inference.server.shape import ReplyShape
from nano_inference.server.translating import (
    given_fields,
    translated_call,
)

_T = TypeVar("_T")

_PARAM_NAMES: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "stop_regex")},
    **{name: name for name in ("ignore_eos", "skip_special_tokens", "logit_bias")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("json_schema", "regex", "ebnf")},
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Field of `CompletionBody` -> SGLang's sampling parameter."""

_BODY_NAMES: Mapping[str, str] = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "cache_salt": "extra_key",
}
"""Field of `CompletionBody` -> field of `SglangBody`, for error messages."""


NamedIds = Annotated[list[TokenId], Field(max_length=MAX_NAMED)]


class CustomParams(Body):
    """Parameters of slime's SGLang."""

    return_top_p_token_ids: bool | None = None  # include `top_p_token_ids` and `top_p_token_offsets` in `meta_info`


class SglangParams(Body):
    """SGLang's SamplingParams with SGLang's defaults; the model's recommended values are not applied."""

    max_new_tokens: Count | None = 128  # None: up to the end of the context
    min_new_tokens: Count | None = 0
    temperature: Temperature | None = 1.0
    top_p: PositiveShare | None = 1.0
    top_k: CountOrOff | None = -1
    min_p: Share | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    repetition_penalty: Factor | None = 1.0
    stop: Stops | None = None
    stop_regex: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIAS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None  # keep the stop string in the text
    n: Samples | None = 1
    sampling_seed: Seed | None = None
    logit_bias: Bias | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    custom_params: CustomParams | None = None


class SglangBody(Body):
    """POST /generate. A list has one entry for each prompt."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    sampling_params: SglangParams | Annotated[list[SglangParams], Field(max_length=MAX_PROMPTS)] | None = None
    return_logprob: bool | Annotated[list[bool], Field(max_length=MAX_PROMPTS)] | None = None
    logprob_start_len: CountOrOff | Annotated[list[CountOrOff], Field(max_length=MAX_PROMPTS)] | None = None
    """First prompt token with log-probabilities in the reply; -1: none."""
    top_logprobs_num: Alternatives | Annotated[list[Alternatives], Field(max_length=MAX_PROMPTS)] | None = None
    token_ids_logprob: NamedIds | Annotated[list[NamedIds], Field(max_length=MAX_PROMPTS)] | None = None
    """Tokens whose log-probabilities are reported at each position of the output."""
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    stream: bool | None = None
    rid: Name | Annotated[list[Name], Field(max_length=MAX_PROMPTS)] | None = None
    cache_salt: Salt | None = Field(default=None, alias="extra_key")
    """Requests share cached prefixes only if they have the same value."""


def sglang_call(body: SglangBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of a request. Raises `ApiError` naming the invalid field of `SglangBody`."""
    prompts, is_list = _prompts(body)
    params = _per_prompt(body.sampling_params, SglangParams(), len(prompts), "sampling_params")
    options = _prompt_options(body, params)
    fields = [_fields(one, option, body) for one, option in zip(params, options, strict=True)]
    source = "text" if body.text is not None else "input_ids"
    calls: list[Call] = []
    for _, run in groupby(range(len(prompts)), key=fields.__getitem__):
        indices = list(run)
        first = indices[0]
        where = f"sampling_params.{first}" if isinstance(body.sampling_params, list) else "sampling_params"
        names = {field: f"{where}.{name}" for field, name in _PARAM_NAMES.items()}
        names |= {**_BODY_NAMES, "prompt": source}
        completion = {**fields[first], "prompt": [prompts[index] for index in indices]}
        calls.append(translated_call(completion, CompletionBody, names, model, config, salt))
    call = _merge(calls)
    for index, (request, option) in enumerate(zip(call.requests, options, strict=True)):
        if option.start > len(request.prompt):
            message = f"logprob_start_len must be at most the length of prompt {index}, {len(request.prompt)}"
            raise ApiError(400, f"{message}; got {option.start}", param="logprob_start_len")
    rids = frozenset(option.rid for option in options) | ({body.rid} if isinstance(body.rid, str) else set())
    make_reply = partial(
        SglangReply,
        options=options,
        is_list=is_list or call.num_samples > 1,
        with_text=bool(body.return_text_in_logprobs),
        with_masks=bool(body.return_sampling_mask),
        vocab_size=model.limits.vocab_size,
    )
    requests = tuple(
        replace(request, params=replace(request.params, logprobs=option.top), is_streamed=bool(body.stream))
        if option.named
        else replace(request, is_streamed=bool(body.stream))
        for request, option in zip(call.requests, options, strict=True)
    )
    return replace(
        call, requests=requests, id=options[0].rid, names=rids, stream=bool(body.stream), make_reply=make_reply
    )


def health_generate_call(model: ServedModel, config: ServerConfig) -> Call:
    """Return the call of /health_generate: one greedy token after a prompt of one token."""
    first = 0 if model.tokenizer.bos_id is None else model.tokenizer.bos_id
    params = SglangParams(max_new_tokens=1, temperature=0.0)
    name = f"HEALTH_CHECK_{uuid.uuid4().hex}"
    return sglang_call(SglangBody(input_ids=[first], sampling_params=params, rid=name), model, config, "")


def _prompts(body: SglangBody) -> tuple[list[Any], bool]:
    """Return the prompts, and True if the client sent a list, so that the reply is a list."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "exactly one of text and input_ids must be given", param="input_ids")
    if body.input_ids is not None:
        ids: list[Any] = body.input_ids
        return (ids, True) if isinstance(ids[0], list) else ([ids], False)
    return (body.text, True) if isinstance(body.text, list) else ([body.text], False)


def _per_prompt(value: _T | list[_T] | None, default: _T, count: int, name: str) -> list[_T]:
    """Return one value for each of `count` prompts. Raises `ApiError` for a list of another length."""
    if isinstance(value, list):
        if len(value) != count:
            raise ApiError(400, f"{name} must have one entry for each of {count} prompts, got {len(value)}", param=name)
        return value
    return [default if value is None else value] * count


def _prompt_options(body: SglangBody, params: Sequence[SglangParams]) -> list[PromptOptions]:
    """Return the reply's options for each prompt; `params` has one entry per prompt."""
    count = len(params)
    base = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
    rids = _per_prompt(body.rid if isinstance(body.rid, list) else None, base, count, "rid")
    if not isinstance(body.rid, list) and count > 1:
        rids = [f"{base}_{index}" for index in range(count)]
    if len(set(rids)) != count:
        raise ApiError(400, "rid must be different for each prompt", param="rid")
    logprobs = _per_prompt(body.return_logprob, False, count, "return_logprob")
    starts = _per_prompt(body.logprob_start_len, -1, count, "logprob_start_len")
    tops = _per_prompt(body.top_logprobs_num, 0, count, "top_logprobs_num")
    given = body.token_ids_logprob or []
    each: list[tuple[int, ...]] = [tuple(one) for one in given if isinstance(one, list)]
    same = tuple(one for one in given if isinstance(one, int))
    named = _per_prompt(each or None, same, count, "token_ids_logprob")
    options = [
        PromptOptions(rid, True, start, top, ids, _has_kept(one))
        if has_logprobs
        else PromptOptions(rid, False, -1, 0, (), _has_kept(one))
        for rid, has_logprobs, start, top, ids, one in zip(rids, logprobs, starts, tops, named, params, strict=True)
    ]
    if any(option.named and option.start >= 0 for option in options):
        text = "token_ids_logprob: not reported for the prompt; leave out logprob_start_len"
        raise ApiError(400, text, param="token_ids_logprob")
    return options


def _fields(params: SglangParams, options: PromptOptions, body: SglangBody) -> JSON:
    """Return the fields of a `CompletionBody` for one prompt, without the prompt."""
    values = given_fields(params)
    fields: JSON = {field: values[name] for field, name in _PARAM_NAMES.items() if name in values}
    fields["max_tokens"] = params.max_new_tokens
    if options.logprobs:
        fields |= {"logprobs": options.top, "logprob_token_ids": list(options.named)}
    if options.start >= 0:
        fields["prompt_logprobs"] = options.top
    masks = bool(body.return_sampling_mask) or options.kept
    return fields | {"return_token_ids": True, "return_sampling_mask": masks, "stream": body.stream}


def _has_kept(params: SglangParams) -> bool:
    return params.custom_params is not None and bool(params.custom_params.return_top_p_token_ids)


def _merge(calls: Sequence[Call]) -> Call:
    """Return several calls as one. Raises `ApiError` for options that must be equal for all prompts."""
    first = calls[0]
    for call in calls[1:]:
        is_equal = {
            "n": call.num_samples == first.num_samples,
            "no_stop_trim": call.shape.include_stop == first.shape.include_stop,
            "skip_special_tokens": call.shape.skip_special == first.shape.skip_special,
        }
        for name, equal in is_equal.items():
            if not equal:
                field = f"sampling_params.{name}"
                raise ApiError(400, f"{field} must be the same for all prompts of a request", param=field)
    return replace(
        first,
        requests=tuple(request for call in calls for request in call.requests),
        num_tokens=sum(call.num_tokens for call in calls),
        shape=_merge_shapes([call.shape for call in calls]),
        forbids_tokens=any(call.forbids_tokens for call in calls),
    )


def _merge_shapes(shapes: Sequence[ReplyShape]) -> ReplyShape:
    """Return a shape that contains what any prompt requests; `SglangReply` leaves out the rest per prompt.

    Stop strings of other prompts only delay text: the engine decides where a sample stops.
    """
    return replace(
        shapes[0],
        stops=tuple(dict.fromkeys(stop for shape in shapes for stop in shape.stops)),
        logprobs=max((shape.logprobs for shape in shapes if shape.logprobs is not None), default=None),
        prompt_logprobs=max((s.prompt_logprobs for s in shapes if s.prompt_logprobs is not None), default=None),
        sampling_masks=any(shape.sampling_masks for shape in shapes),
    )


DIALECT = Dialect(
    generating=(
        Generating(
            path="/generate",
            body=SglangBody,
            to_call=sglang_call,
            summary="Complete texts or token ids; the interface of SGLang.",
        ),
    ),
    probing=(
        Probing(
            path="/health_generate", to_call=health_generate_call, summary="Check that the engine samples a token."
        ),
    ),
)
