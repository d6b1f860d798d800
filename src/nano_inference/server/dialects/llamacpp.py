"""llama.cpp's POST /completion and /completions, and GET /props.

Fields and reply as in its server's README (tools/server/README.md). Differences: `repeat_penalty` covers the whole
prompt and answer and the other penalties the whole answer, not the last 64 tokens; a token forbidden with `false` gets
a bias of -100.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import nano_inference
from nano_inference.server.call import JSON, Call
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Describing, Dialect, Generating, Occupancy
from nano_inference.server.dialects.llamacpp_body import (
    LlamaBody,
    PromptText,
)
from nano_inference.server.dialects.llamacpp_reply import LlamaReply, ReplyOptions, error_body, stream_error
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors, check_text_length
from nano_inference.server.schema import CompletionBody
from nano_inference.server.translating import (
    given_fields,
    translated_call,
    unsupported_field,
    with_processed_logprobs,
    without_prefix_cache,
)
from nano_inference.text.dialogue import TemplateDialogue
from nano_inference.text.tokenizer import Tokenizer

_MOST_BIAS = 100.0  # the largest bias of OpenAI's API; its negative bans a token
_RANDOM_SEEDS = (None, -1, 2**32 - 1)

_CLIENT_NAMES: Mapping[str, str] = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
"""Field of `CompletionBody` -> llama.cpp's field, where the names differ."""

_SAME_NAME = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("stop", "ignore_eos", "grammar", "json_schema"),
)
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""Names of the samplers in the order in which they are applied."""


def llama_call(body: LlamaBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /completion. Raises `ApiError` naming the invalid field."""
    if body.repeat_last_n is not None and body.repeat_last_n > 0:
        message = f"repeat_last_n must be -1 (all tokens) or 0 (no penalty), got {body.repeat_last_n}"
        raise unsupported_field("repeat_last_n", message)
    fields = {"prompt": _prompts(body.prompt, model)} | _fields(body, model, config)
    call = translated_call(fields, CompletionBody, _CLIENT_NAMES, model, config, salt)
    call = with_processed_logprobs(call) if body.post_sampling_probs else call
    call = without_prefix_cache(call) if body.cache_prompt is False else call
    options = ReplyOptions(
        settings=partial(_settings, body),
        probs=bool(body.post_sampling_probs),
        tokens=bool(body.return_tokens),
        timings=bool(body.timings_per_token),
        fields=tuple(body.response_fields or ()),
    )
    name = f"cmpl-{uuid.uuid4().hex}"
    return replace(call, id=name, names=frozenset({name}), make_reply=partial(LlamaReply, options=options))


def props(model: ServedModel, occupancy: Occupancy) -> JSON:
    """Return the reply of GET /props; `model_path` is the file's name, without its directory."""
    dialogue, named = model.dialogue, model.tokenizer.named
    defaults = given_fields(LlamaBody(prompt=""))
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    params = {"n_predict": -1, **{name: defaults[name] for name in (*names, "n_probs")}}
    params["seed"] = model.generation.get("seed", -1)
    return {
        "default_generation_settings": {"n_ctx": model.limits.max_model_len, "params": params},
        "total_slots": occupancy.max_running,
        "model_alias": model.name,
        "model_path": model.file_name or model.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": dialogue.template.source if isinstance(dialogue, TemplateDialogue) else "",
        "bos_token": named.get("bos_token", ""),
        "eos_token": named.get("eos_token", ""),
        "build_info": f"nano-inference {nano_inference.__version__}",
    }


def _fields(body: LlamaBody, model: ServedModel, config: ServerConfig) -> JSON:
    """Return the fields of a `CompletionBody` that are not about the prompt."""
    values = given_fields(body)
    fields: JSON = {name: values[name] for name in _SAME_NAME if name in values}
    if body.temperature is None or "temperature" not in body.model_fields_set:
        fields["temperature"] = config.temp if config.temp is not None else fields["temperature"]
    if body.repeat_last_n == 0:
        fields |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    else:
        fields["repetition_penalty"] = values["repeat_penalty"]
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    seed = body.seed
    if seed in _RANDOM_SEEDS:  # None is the server's default; a body that asks for a random seed gets one
        seed = secrets.randbits(32) if "seed" in body.model_fields_set and seed is not None else None
    bias = _bias(body.logit_bias, model.tokenizer)
    if body.ignore_eos:  # llama.cpp then does not sample the end tokens at all
        bias |= dict.fromkeys(map(str, sorted(model.limits.eos_token_ids)), -_MOST_BIAS)
    return fields | {
        "model": body.model,
        "n": body.n_cmpl,
        "max_tokens": None if limit is None or limit < 0 else limit,  # None: up to the end of the context
        "seed": seed,
        "logit_bias": bias,
        "stream": body.stream,
        "return_progress": body.return_progress,
        "return_token_ids": True,
    }


def _prompts(prompt: Any, model: ServedModel) -> Any:
    """Return the `prompt` of a `CompletionBody`: all texts, or all lists of ids."""
    if isinstance(prompt, str | PromptText):
        return _text(prompt, "prompt")
    prompt = [_text(one, f"prompt.{index}") for index, one in enumerate(prompt)]
    if any(isinstance(one, int) for one in prompt):
        return _tokenize_pieces(prompt, model)
    if all(isinstance(one, str) for one in prompt):
        return prompt
    return [_tokenize_pieces([one] if isinstance(one, str) else one, model) for one in prompt]


def _text(prompt: Any, where: str) -> Any:
    """Return the text of a `PromptText`, and another prompt as it is. Raises `ApiError` for media."""
    if not isinstance(prompt, PromptText):
        return prompt
    media = (prompt.model_extra or {}).get("multimodal_data")
    if media not in (None, "", []):
        raise unsupported_field(f"{where}.multimodal_data")
    return prompt.prompt_string


def _tokenize_pieces(pieces: Sequence[int | str], model: ServedModel) -> list[int]:
    """Return the ids of a prompt made of ids and texts; special tokens are added only to a text in first position."""
    check_text_length((piece for piece in pieces if isinstance(piece, str)), "prompt", model)
    ids: list[int] = []
    with api_errors("prompt"):
        for index, piece in enumerate(pieces):
            ids += [piece] if isinstance(piece, int) else model.tokenizer.encode(piece, add_special=index == 0)
    return ids


def _bias(bias: Any, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the biases as {token id: bias}. Raises `ApiError` for a malformed entry.

    Texts may share tokens, whose biases are added, at most to 100.
    """
    if not bias:
        return {}
    pairs = (
        [(int(key) if key.isdecimal() else key, value) for key, value in bias.items()]
        if isinstance(bias, dict)
        else bias
    )
    sums: dict[str, float] = {}
    for index, pair in enumerate(pairs):
        where = f"logit_bias.{index}"
        if len(pair) != 2 or isinstance(pair[0], bool | float) or isinstance(pair[1], str) or pair[1] is True:
            raise ApiError(400, f"{where}: must be [token id or text, number or false]", param=where)
        key, value = pair
        if abs(value) > _MOST_BIAS:
            raise ApiError(400, f"{where}: the bias must be from -100 to 100, got {value}", param=where)
        tokens = [key] if isinstance(key, int) else tokenizer.encode(key, add_special=False)
        for token in tokens:
            sums[str(token)] = sums.get(str(token), 0.0) + (-_MOST_BIAS if value is False else float(value))
    return {token: max(-_MOST_BIAS, min(_MOST_BIAS, bias)) for token, bias in sums.items()}


def _settings(body: LlamaBody, call: Call) -> JSON:
    """Return the reply's `generation_settings`."""
    params = call.requests[0].params
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(call.shape.stops),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [
            {"token": token, "bias": None if bias <= -_MOST_BIAS else bias}
            for token, bias in sorted(params.logit_bias.items())
        ],
        "n_probs": call.shape.logprobs or 0,
        "grammar": body.grammar or "",
        "samplers": list(_SAMPLERS),
        "stream": call.stream,
        "timings_per_token": bool(body.timings_per_token),
    }


DIALECT = Dialect(
    generating=tuple(
        Generating(
            path=path,
            body=LlamaBody,
            to_call=llama_call,
            summary="Complete a text or token ids; the interface of llama.cpp's server.",
        )
        for path in ("/completion", "/completions")
    ),
    describing=(
        Describing(
            path="/props",
            describe=props,
            summary="Describe the model and the defaults of /completion; the interface of llama.cpp's server.",
        ),
    ),
    error_body=error_body,
    stream_error=lambda error, first, number: stream_error(error),
)
