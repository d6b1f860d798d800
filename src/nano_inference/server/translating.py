"""Shared by the dialects of other servers: errors with their field names, changes to calls. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from nano_inference.core.admission import Limits
from nano_inference.server.body import parse
from nano_inference.server.call import JSON, Call
from nano_inference.server.calls import chat_call, completion_call
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, renamed
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body, ChatBody, CompletionBody

_B = TypeVar("_B", bound=Body)
_UNLIMITED = 1 << 40


def as_body(fields: Mapping[str, Any], kind: type[_B]) -> _B:
    """Return a body with these fields. Raises `ApiError` naming an invalid one."""
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return parse(to_json(fields), kind)  # raises the client's error


def with_current_reasoning(messages: Sequence[JSON]) -> list[JSON]:
    """Return a chat's messages; those before the user's last text without `reasoning_content`."""
    start = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {name: value for name, value in message.items() if index > start or name != "reasoning_content"}
        for index, message in enumerate(messages)
    ]


def given_fields(body: Body) -> dict[str, Any]:
    """Return a body's known fields with their values or defaults, without those that are None."""
    values: dict[str, Any] = {}
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        values[name] = field.default if value is None else value
    return {name: value for name, value in values.items() if value is not None}


def translated_call(
    fields: Mapping[str, Any],
    kind: type[CompletionBody | ChatBody],
    names: Mapping[str, str],
    model: ServedModel,
    config: ServerConfig,
    salt: str,
) -> Call:
    """Return the call of a completion or a chat with these fields; its errors, also later ones, have a dialect's names.

    `names`: field of `kind` -> the dialect's. With `max_tokens` None and no default of the server, the output of a
    completion may fill the context. Raises `ApiError`.
    """
    is_unlimited = kind is CompletionBody and fields["max_tokens"] is None and config.n_predict is None
    if is_unlimited:
        fields = {**fields, "max_tokens": max(1, fields.get("min_tokens") or 0)}  # passes validation
    try:
        if kind is ChatBody:
            call = chat_call(as_body(fields, ChatBody), model, config, salt)
        else:
            call = completion_call(as_body(fields, CompletionBody), model, config, salt)
    except ApiError as error:
        raise renamed(error, names) from None
    requests = []
    for request in call.requests:
        if request.structure is not None:  # compiled later, and its errors name its field
            head, dot, path = request.structure.field.partition(".")
            structure = request.structure._replace(field=names.get(head, head) + dot + path)
            request = replace(request, structure=structure)
        requests.append(request)
    call = replace(call, requests=tuple(requests))
    return fill_context(call, model.limits) if is_unlimited else call


def prompt_length(fields: Mapping[str, Any], names: Mapping[str, str], model: ServedModel) -> int:
    """Return the number of tokens of a chat's prompt, also beyond the model's context. Raises `ApiError`."""
    unlimited = replace(model, limits=replace(model.limits, max_model_len=_UNLIMITED, num_blocks=_UNLIMITED))
    return len(translated_call(fields, ChatBody, names, unlimited, ServerConfig(), "").requests[0].prompt)


def fill_context(call: Call, limits: Limits) -> Call:
    """Return a call without `max_tokens`: outputs may fill the context."""
    room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    requests = tuple(replace(request, params=replace(request.params, max_tokens=None)) for request in call.requests)
    num_tokens = sum(len(request.prompt) + request.num_samples * (room - len(request.prompt)) for request in requests)
    return replace(call, requests=requests, num_tokens=num_tokens)


def without_prefix_cache(call: Call) -> Call:
    """Return a call that uses no cached prefix, by a unique salt."""
    requests = tuple(replace(request, salt=f"{request.salt}#{uuid.uuid4().hex}") for request in call.requests)
    return replace(call, requests=requests)


def with_processed_logprobs(call: Call) -> Call:
    """Return a call whose log-probabilities are those of the distribution that tokens are drawn from."""
    requests = tuple(
        replace(request, params=replace(request.params, logprobs_mode="processed")) for request in call.requests
    )
    return replace(call, requests=requests)
