"""SGLang's POST /generate, and the one token of /health_generate.

Fields and reply as in sglang/srt/managers/io_struct.py and sglang/srt/sampling/sampling_params.py. Further goes
`mask` in `meta_info` (1 where the model drew a token). Ids always keep every token, the one that stopped it too.
Taken without effect, because they speak of SGLang's own logs and queues: `log_metrics`, `no_logs`, `background`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from nano_inference.config import ServerConfig
from nano_inference.server.call import JSON, Call
from nano_inference.server.calls import completion_call
from nano_inference.server.dialect import Dialect, Generating, Probing
from nano_inference.server.dialects.sglang_reply import SglangReply, Told
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import (
    MAX_BIAS,
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
    as_body,
    fill_context,
    given_fields,
    refuse,
    refuse_unknown,
    rename_structures,
    renamed_errors,
)
from nano_inference.server.unsupported import EMPTY, OFF, refuse_unsupported

_T = TypeVar("_T")

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "input_embeds": EMPTY,
        "image_data": EMPTY,
        "video_data": EMPTY,
        "audio_data": EMPTY,
        "modalities": EMPTY,
        "token_ids_logprob": EMPTY,
        "multi_item_scoring_delimiter": (None,),
        "session_params": EMPTY,
        "lora_path": EMPTY,
        "lora_id": EMPTY,
        "custom_logit_processor": EMPTY,
        "return_hidden_states": OFF,
        "return_routed_experts": OFF,
        "return_prompt_token_ids": OFF,
        "return_entropy": OFF,
        "return_bytes": OFF,
        "priority": (None, 0),
        "data_parallel_rank": (None, 0),
        "routed_dp_rank": (None, 0),
        "bootstrap_host": EMPTY,
        "bootstrap_port": EMPTY,
        "bootstrap_room": (None,),
    }
)
"""Fields of SGLang's request that are not done -> the values with which they change nothing."""

UNSUPPORTED_PARAMS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "stop_regex": EMPTY,
        "structural_tag": EMPTY,
        "spaces_between_special_tokens": (None, True),
        "custom_params": EMPTY,
        "stream_interval": (None, 1),
        "beam_width": (None, 1),
        "thinking_budget": (None,),
    }
)
"""The same among SGLang's sampling parameters."""

PARAM_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids")},
        **{name: name for name in ("ignore_eos", "skip_special_tokens", "logit_bias")},
        **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
        **{name: name for name in ("json_schema", "regex", "ebnf")},
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop_str_in_output": "no_stop_trim",
    }
)
"""Our fields -> SGLang's sampling parameters."""

_NAMES = MappingProxyType(
    {
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "logprob_start_len",
        "cache_salt": "extra_key",
    }
)


class SglangParams(Body):
    """SGLang's SamplingParams with SGLang's defaults; what the model's files recommend does not count here."""

    max_new_tokens: Count | None = 128
    """None is all the room there is."""
    min_new_tokens: Count | None = 0
    temperature: Temperature | None = 1.0
    top_p: PositiveShare | None = 1.0
    top_k: CountOrOff | None = -1
    min_p: Share | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    repetition_penalty: Factor | None = 1.0
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIAS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    """Leave the stop string in the text."""
    n: Samples | None = 1
    sampling_seed: Seed | None = None
    logit_bias: Bias | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None


Start = CountOrOff


class SglangBody(Body):
    """POST /generate. What is a list has one entry for each prompt."""

    neutral_names: ClassVar[frozenset[str]] = frozenset(UNSUPPORTED)

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    sampling_params: SglangParams | Annotated[list[SglangParams], Field(max_length=MAX_PROMPTS)] | None = None
    return_logprob: bool | Annotated[list[bool], Field(max_length=MAX_PROMPTS)] | None = None
    logprob_start_len: Start | Annotated[list[Start], Field(max_length=MAX_PROMPTS)] | None = None
    """From which token of the prompt on log-probabilities are wanted; -1 is none of it."""
    top_logprobs_num: Alternatives | Annotated[list[Alternatives], Field(max_length=MAX_PROMPTS)] | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    stream: bool | None = None
    rid: Name | Annotated[list[Name], Field(max_length=MAX_PROMPTS)] | None = None
    cache_salt: Salt | None = Field(default=None, alias="extra_key")
    """Requests share cached prefixes only within one."""
    log_metrics: bool | None = None
    """Taken and left out, like the next: they speak of SGLang's own logs."""
    no_logs: bool | None = None
    background: bool | None = None


def sglang_call(body: SglangBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of a request. Raises `ApiError` naming the field that is wrong, as the client calls it."""
    extra = body.model_extra or {}
    refuse(extra, UNSUPPORTED)
    refuse_unsupported({name: value for name, value in extra.items() if name not in UNSUPPORTED})
    prompts, is_list = _prompts(body)
    params = _each(body.sampling_params, SglangParams(), len(prompts), "sampling_params")
    told = _told(body, prompts)
    wanted = [_fields(one, tell, body) for one, tell in zip(params, told, strict=True)]
    source = "text" if body.text is not None else "input_ids"
    calls: list[Call] = []
    for (fields, _), run in groupby(
        range(len(prompts)), key=lambda index: (wanted[index], params[index].max_new_tokens)
    ):
        indices = list(run)
        names = _names(source, indices[0] if isinstance(body.sampling_params, list) else None)
        with renamed_errors(names):
            asked = as_body({**fields, "prompt": [prompts[index] for index in indices]}, CompletionBody)
            one = rename_structures(completion_call(asked, model, config, salt), names)
            calls.append(fill_context(one, model.limits) if params[indices[0]].max_new_tokens is None else one)
    call = _merged(calls)
    for index, (request, tell) in enumerate(zip(call.requests, told, strict=True)):
        if tell.start > len(request.prompt):
            message = f"logprob_start_len must be at most the length of prompt {index}, {len(request.prompt)}"
            raise ApiError(400, f"{message}; got {tell.start}", param="logprob_start_len")
    rids = frozenset(one.rid for one in told) | ({body.rid} if isinstance(body.rid, str) else set())
    make_reply = partial(
        SglangReply, told=told, is_list=is_list or call.num_samples > 1, with_text=bool(body.return_text_in_logprobs)
    )
    return replace(call, id=told[0].rid, names=rids, stream=bool(body.stream), make_reply=make_reply)


def health_generate_call(model: ServedModel, config: ServerConfig) -> Call:
    """Return the call of /health_generate: one token behind one token. That an answer comes is the answer."""
    first = 0 if model.tokenizer.bos_id is None else model.tokenizer.bos_id
    params = SglangParams(max_new_tokens=1, temperature=0.0)
    name = f"HEALTH_CHECK_{uuid.uuid4().hex}"
    return sglang_call(SglangBody(input_ids=[first], sampling_params=params, rid=name), model, config, "")


def _prompts(body: SglangBody) -> tuple[list[Any], bool]:
    """Return the prompts, and whether they came as a list: their replies do so then."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "exactly one of text and input_ids must be given", param="input_ids")
    if body.input_ids is not None:
        ids: list[Any] = body.input_ids
        return (ids, True) if isinstance(ids[0], list) else ([ids], False)
    return (body.text, True) if isinstance(body.text, list) else ([body.text], False)


def _each(value: _T | list[_T] | None, default: _T, count: int, name: str) -> list[_T]:
    """Return one value for each prompt, from one for all or a list of them. Raises `ApiError` for another number."""
    if isinstance(value, list):
        if len(value) != count:
            raise ApiError(400, f"{name} must have one entry for each of {count} prompts, got {len(value)}", param=name)
        return value
    return [default if value is None else value] * count


def _told(body: SglangBody, prompts: Sequence[Any]) -> list[Told]:
    """Return what each prompt's reply tells."""
    count = len(prompts)
    base = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
    rids = _each(body.rid if isinstance(body.rid, list) else None, base, count, "rid")
    if not isinstance(body.rid, list) and count > 1:
        rids = [f"{base}_{index}" for index in range(count)]
    if len(set(rids)) != count:
        raise ApiError(400, "rid must not name two prompts alike", param="rid")
    wanted = _each(body.return_logprob, False, count, "return_logprob")
    starts = _each(body.logprob_start_len, -1, count, "logprob_start_len")
    tops = _each(body.top_logprobs_num, 0, count, "top_logprobs_num")
    return [
        Told(rid, logprobs, start if logprobs else -1, top if logprobs else 0)
        for rid, logprobs, start, top in zip(rids, wanted, starts, tops, strict=True)
    ]


def _fields(params: SglangParams, told: Told, body: SglangBody) -> JSON:
    """Return the fields of a completion for one prompt, without the prompt."""
    refuse_unknown(params.model_extra or {}, UNSUPPORTED_PARAMS, "sampling_params.")
    theirs = given_fields(params)
    fields: JSON = {ours: theirs[name] for ours, name in PARAM_NAMES.items() if name in theirs}
    if params.max_new_tokens is None:
        fields["max_tokens"] = max(1, params.min_new_tokens or 0)  # for the checks; `roomy` lifts it
    if told.logprobs:
        fields["logprobs"] = told.top
    if told.start >= 0:
        fields["prompt_logprobs"] = told.top
    return fields | {"return_token_ids": True, "return_sampling_mask": body.return_sampling_mask, "stream": body.stream}


def _names(source: str, index: int | None) -> dict[str, str]:
    """Return the client's names of our fields; `index` is of the sampling parameters, when there are several."""
    where = "sampling_params" if index is None else f"sampling_params.{index}"
    params = {ours: f"{where}.{theirs}" for ours, theirs in PARAM_NAMES.items()}
    return {**params, **_NAMES, "prompt": source}


def _merged(calls: Sequence[Call]) -> Call:
    """Return several calls as one. Raises `ApiError` for what cannot differ among its prompts."""
    first = calls[0]
    for call in calls[1:]:
        alike = {
            "n": call.num_samples == first.num_samples,
            "no_stop_trim": call.shape.include_stop == first.shape.include_stop,
            "skip_special_tokens": call.shape.skip_special == first.shape.skip_special,
        }
        for name, is_alike in alike.items():
            if not is_alike:
                place = f"sampling_params.{name}"
                raise ApiError(400, f"{place} must be the same for all prompts of a request", param=place)
    return replace(
        first,
        requests=tuple(request for call in calls for request in call.requests),
        num_tokens=sum(call.num_tokens for call in calls),
        shape=_joint_shape([call.shape for call in calls]),
        forbids_tokens=any(call.forbids_tokens for call in calls),
    )


def _joint_shape(shapes: Sequence[ReplyShape]) -> ReplyShape:
    """Return one shape for all prompts: the reply leaves out what is not told of one of them.

    A stop string of another prompt does no harm: it only holds text back for a while, and the engine alone stops.
    """
    return replace(
        shapes[0],
        stops=tuple(dict.fromkeys(stop for shape in shapes for stop in shape.stops)),
        logprobs=max((shape.logprobs for shape in shapes if shape.logprobs is not None), default=None),
        prompt_logprobs=max((s.prompt_logprobs for s in shapes if s.prompt_logprobs is not None), default=None),
    )


DIALECT = Dialect(
    generating=(
        Generating(
            path="/generate",
            body=SglangBody,
            to_call=sglang_call,
            summary="Continue texts or token ids, as SGLang does.",
        ),
    ),
    probing=(
        Probing(path="/health_generate", to_call=health_generate_call, summary="Draw a token, to see that one comes."),
    ),
)
