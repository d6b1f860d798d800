"""SGLang's POST /generate and GET /health_generate.

Fields and reply as in sglang/srt/managers/io_struct.py and sglang/srt/sampling/sampling_params.py. Extension: `mask` in
`meta_info` (1 where the model sampled the token). `output_ids` includes the stop token.
"""

from __future__ import annotations

import sys
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import Field

from nano_inference.server import schema
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry, token_text
from nano_inference.server.dialect import Dialect, Probing, Route
from nano_inference.server.errors import ApiError, refused
from nano_inference.server.events import event
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import Reply, version_facts
from nano_inference.server.schema import Body, CompletionBody
from nano_inference.server.transcript import Transcript
from nano_inference.server.translated import given_fields, translated
from nano_inference.types import SamplingMask, TopLogprobs, TrainingSample

_T = TypeVar("_T")
_GROWTH_DIVISOR = 64
"""Every event contains all text so far, so a long answer's next event waits until it has grown by 1/64. The bytes of
all events are then linear in the length of the answer, not quadratic."""

NamedIds = Annotated[list[schema.TokenId], Field(max_length=schema.MAX_NAMED)]
AdapterName = Annotated[str, Field(max_length=512)]
_Each = Annotated[list[_T], Field(max_length=schema.MAX_PROMPTS)]  # one value for each prompt


class CustomParams(Body):
    """Parameters of slime's SGLang."""

    return_top_p_token_ids: bool | None = None  # include `top_p_token_ids` and `top_p_token_offsets` in `meta_info`


class SglangParams(Body):
    """SGLang's SamplingParams with SGLang's defaults; the model's recommended values are not applied."""

    max_new_tokens: schema.Count | None = 128  # None: up to the end of the context
    min_new_tokens: schema.Count | None = 0
    temperature: schema.Temperature | None = 1.0
    top_p: schema.PositiveShare | None = 1.0
    top_k: schema.CountOrOff | None = -1
    min_p: schema.Share | None = 0.0
    frequency_penalty: schema.Penalty | None = 0.0
    presence_penalty: schema.Penalty | None = 0.0
    repetition_penalty: schema.Factor | None = 1.0
    stop: schema.Stops | None = None
    stop_regex: schema.Stops | None = None
    stop_token_ids: Annotated[list[schema.TokenId], Field(max_length=schema.MAX_BIAS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None  # keep the stop string in the text
    n: schema.Samples | None = 1
    sampling_seed: schema.Seed | None = None
    logit_bias: schema.Bias | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    custom_params: CustomParams | None = None


class SglangBody(Body):
    """POST /generate. A list has one entry for each prompt."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=schema.MAX_PROMPTS, fail_fast=True)] | None = None
    input_ids: (
        schema.TokenIds | Annotated[list[schema.TokenIds], Field(min_length=1, max_length=schema.MAX_PROMPTS)] | None
    ) = None
    sampling_params: SglangParams | _Each[SglangParams] | None = None
    return_logprob: bool | _Each[bool] | None = None
    logprob_start_len: schema.CountOrOff | _Each[schema.CountOrOff] | None = None
    """First prompt token with log-probabilities in the reply; -1: none."""
    top_logprobs_num: schema.Alternatives | _Each[schema.Alternatives] | None = None
    token_ids_logprob: NamedIds | _Each[NamedIds] | None = None
    """Tokens whose log-probabilities are reported at each position of the output."""
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    stream: bool | None = None
    rid: schema.Name | _Each[schema.Name] | None = None
    cache_salt: schema.Salt | None = Field(default=None, alias="extra_key")
    """Requests share cached prefixes only if they have the same value."""
    lora_path: AdapterName | _Each[AdapterName | None] | None = None  # name of a loaded adapter; SGLang calls it a path


_PARAM_NAMES: Mapping[str, str] = {
    **{name: name for name in SglangParams.model_fields if name in CompletionBody.model_fields},
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
    "model": "lora_path",
}
"""Field of `CompletionBody` -> field of `SglangBody`, for error messages."""


class PromptOptions(NamedTuple):
    rid: str
    logprobs: bool
    start: int  # first prompt token with a log-probability; -1: none
    top: int  # alternatives of each token
    named: tuple[int, ...]  # tokens reported at each position of the output, in addition to the alternatives
    kept: bool  # whether the tokens that could be sampled are included in slime's form


class ReplyOptions(NamedTuple):
    body: SglangBody
    prompts: Sequence[PromptOptions]
    is_list: bool
    vocab_size: int


# ---- body -> generation


def ask_sglang(body: SglangBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body asks for. Raises `ApiError` naming the invalid field of `SglangBody`."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "exactly one of text and input_ids must be given", param="input_ids")
    given: Any = body.text if body.input_ids is None else body.input_ids
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    prompts: list[Any] = given if is_list else [given]
    params = _per_prompt(body.sampling_params, SglangParams(), len(prompts), "sampling_params")
    options = _prompt_options(body, params)
    adapters = _per_prompt(body.lora_path, None, len(prompts), "lora_path")
    fields: list[JSON] = []  # of a `CompletionBody` for each prompt, without the prompt
    for one, option, adapter in zip(params, options, adapters, strict=True):
        if adapter and model.adapter_for(adapter) is None:
            raise refused("lora_path", f"no adapter {adapter[:200]!r} is loaded")
        values = given_fields(one)
        known: JSON = {field: values[name] for field, name in _PARAM_NAMES.items() if name in values}
        if option.logprobs:
            known |= {"logprobs": option.top, "logprob_token_ids": list(option.named)}
        if option.start >= 0:
            known["prompt_logprobs"] = option.top
        masks = bool(body.return_sampling_mask) or option.kept
        known |= {"max_tokens": one.max_new_tokens, "return_sampling_mask": masks}
        fields.append(known | {"model": adapter or None, "return_token_ids": True, "stream": body.stream})
    generations: list[Generation] = []
    for _, run in groupby(range(len(prompts)), key=fields.__getitem__):  # prompts with equal fields are translated once
        indices = list(run)
        where = f"sampling_params.{indices[0]}" if isinstance(body.sampling_params, list) else "sampling_params"
        names = {field: f"{where}.{name}" for field, name in _PARAM_NAMES.items()}
        names |= {**_BODY_NAMES, "prompt": "input_ids" if body.text is None else "text"}
        completion = {**fields[indices[0]], "prompt": [prompts[index] for index in indices]}
        generations.append(translated(completion, CompletionBody, names, model, config, salt))
    generation = _merge(generations)
    for index, (request, option) in enumerate(zip(generation.requests, options, strict=True)):
        if option.start > len(request.prompt):
            message = f"logprob_start_len must be at most the length of prompt {index}, {len(request.prompt)}"
            raise ApiError(400, f"{message}; got {option.start}", param="logprob_start_len")
    is_list = is_list or generation.num_samples > 1
    return replace(
        generation,
        requests=tuple(  # beside named tokens, SGLang reports the alternatives too
            replace(request, params=replace(request.params, logprobs=option.top)) if option.named else request
            for request, option in zip(generation.requests, options, strict=True)
        ),
        id=options[0].rid,
        names=frozenset(option.rid for option in options) | ({body.rid} if isinstance(body.rid, str) else set()),
        options=ReplyOptions(body, options, is_list, model.limits.vocab_size),
    )


def ask_health(model: ServedModel, config: ServerConfig) -> Generation:
    """Return what /health_generate asks for: one greedy token after a prompt of one token."""
    first = 0 if model.tokenizer.bos_id is None else model.tokenizer.bos_id
    params = SglangParams(max_new_tokens=1, temperature=0.0)
    name = f"HEALTH_CHECK_{uuid.uuid4().hex}"
    return ask_sglang(SglangBody(input_ids=[first], sampling_params=params, rid=name), model, config, "")


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
    if isinstance(body.rid, list):
        rids = _per_prompt(body.rid, "", count, "rid")
    else:
        base = body.rid or uuid.uuid4().hex
        rids = [base] if count == 1 else [f"{base}_{index}" for index in range(count)]
    if len(set(rids)) != count:
        raise ApiError(400, "rid must be different for each prompt", param="rid")
    logprobs = _per_prompt(body.return_logprob, False, count, "return_logprob")
    starts = _per_prompt(body.logprob_start_len, -1, count, "logprob_start_len")
    tops = _per_prompt(body.top_logprobs_num, 0, count, "top_logprobs_num")
    named: Any = body.token_ids_logprob or None
    if named is not None and isinstance(named[0], int):  # the same for all prompts
        named = [named] * count
    named = _per_prompt(named, [], count, "token_ids_logprob")
    options = []
    for index, one in enumerate(params):
        kept = one.custom_params is not None and bool(one.custom_params.return_top_p_token_ids)
        option = PromptOptions(rids[index], False, -1, 0, (), kept)
        if logprobs[index]:
            option = PromptOptions(rids[index], True, starts[index], tops[index], tuple(named[index]), kept)
        if option.named and option.start >= 0:
            raise refused("token_ids_logprob", "not reported for the prompt; leave out logprob_start_len")
        options.append(option)
    return options


def _merge(several: Sequence[Generation]) -> Generation:
    """Return several generations as one. Raises `ApiError` for options that must be equal for all prompts.

    Its reply contains what any prompt requests; `SglangReply` leaves out the rest per prompt. Stop strings of other
    prompts only delay text: the engine decides where a sample stops.
    """
    first, asked = several[0], [one.logprobs for one in several if one.logprobs is not None]
    for name, values in (
        ("n", [one.num_samples for one in several]),
        ("no_stop_trim", [one.include_stop for one in several]),
        ("skip_special_tokens", [one.skip_special for one in several]),
    ):
        if len(set(values)) > 1:
            field = f"sampling_params.{name}"
            raise ApiError(400, f"{field} must be the same for all prompts of a request", param=field)
    return replace(
        first,
        requests=tuple(request for one in several for request in one.requests),
        structures=tuple(structure for one in several for structure in one.structures or (None,) * len(one.requests)),
        num_tokens=sum(one.num_tokens for one in several),
        stops=tuple(dict.fromkeys(stop for one in several for stop in one.stops)),
        logprobs=max(asked, default=None),
        prompt_logprobs=max((one.prompt_logprobs for one in several if one.prompt_logprobs is not None), default=None),
        forbids_tokens=any(one.forbids_tokens for one in several),
    )


# ---- reply


def next_event(num_tokens: int) -> int:
    """Return the number of tokens at which the event after `num_tokens` is sent."""
    return num_tokens + max(1, num_tokens // _GROWTH_DIVISOR)


@dataclass
class SglangReply(Reply[ReplyOptions]):
    """The reply to /generate: an object for one prompt, a list for several or for several samples."""

    keeps: ClassVar[bool] = True  # each event has all of its sample
    _started_at: float = field(init=False, default_factory=time.monotonic)
    _next: dict[int, int] = field(init=False, default_factory=dict)
    """Number of tokens of each sample at which its next event is sent; 1 at first."""

    def whole(self) -> Any:
        answers = list(map(self._answer, self.transcripts))
        return answers if self.options.is_list else answers[0]

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        index, count = transcript.index, len(transcript.token_ids)
        if transcript.finish_reason is None and count < self._next.get(index, 1):
            return b""
        self._next[index] = next_event(count)
        answer = self._answer(transcript)
        return event({**answer, "index": index} if self.options.is_list else answer)

    def _answer(self, transcript: Transcript) -> JSON:
        options, sample = self.options.prompts[transcript.prompt_index], transcript.sample
        generation, masks, num_samples = self.generation, transcript.sampling_masks, self.generation.num_samples
        if sample is not None:  # the oldest version: the trainer's label, or else its number
            version = str(sample.version_labels.get(sample.weight_version, sample.weight_version))
        else:
            version = str(min(transcript.versions, default=""))
        meta: JSON = {
            "id": options.rid if num_samples == 1 else f"{options.rid}_{transcript.index % num_samples}",
            "finish_reason": _finish_reason(transcript),
            "prompt_tokens": len(generation.requests[transcript.prompt_index].prompt),
            "completion_tokens": len(transcript.token_ids),
            "cached_tokens": sample.num_cached_tokens if sample is not None else 0,
            "num_retractions": sample.num_preemptions if sample is not None else 0,
            "weight_version": version,
            **version_facts(transcript, generation),
            "mask": list(transcript.mask),
            "e2e_latency": time.monotonic() - self._started_at,
        }
        if options.logprobs:
            meta |= self._logprobs(transcript.entries, options)
        if options.start >= 0 and sample is not None:
            meta |= self._input_logprobs(sample, options)
        if self.options.body.return_sampling_mask:
            meta["sampling_mask"] = list(masks)
        if options.kept and transcript.finish_reason is not None:
            meta |= kept_tokens(masks, self.options.vocab_size)
        return {"text": transcript.text, "output_ids": list(transcript.token_ids), "meta_info": meta}

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

    def _input_logprobs(self, sample: TrainingSample, options: PromptOptions) -> JSON:
        """Return the prompt's log-probabilities; the first entry is None, as in SGLang."""
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
        return [
            logprob,
            token,
            token_text(token, self.generation.tokenizer) if self.options.body.return_text_in_logprobs else None,
        ]


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


def _finish_reason(transcript: Transcript) -> JSON | None:
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


_GENERATE, _PROBE = "Complete texts or token ids; the interface of SGLang.", "Check that the engine samples a token."
DIALECT = Dialect(
    generating=(Route(path="/generate", body=SglangBody, ask=ask_sglang, reply=SglangReply, summary=_GENERATE),),
    probing=(Probing(path="/health_generate", ask=ask_health, reply=SglangReply, summary=_PROBE),),
)
