"""Shared by the dialects of other servers: errors with their field names, changes to calls. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from nano_inference.core.admission import Limits
from nano_inference.server.body import parse
from nano_inference.server.call import JSON, Call
from nano_inference.server.calls import completion_call
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body, CompletionBody
from nano_inference.server.structured import Structure

_FIELD = re.compile(r"(?<![\w.])(?P<head>[a-z]+(?:_[a-z]+)*)(?P<path>(?:\.\w+|\[\d+\])*)")
"""A possible field in a message, with its path."""
_MOVED = "messages"
"""A field whose items a dialect may have in another order: renamed without its path."""
_HEAD = re.compile(r"^[a-z_]+")
_B = TypeVar("_B", bound=Body)


def as_body(fields: Mapping[str, Any], kind: type[_B]) -> _B:
    """Return a body with these fields. Raises `ApiError` naming an invalid one."""
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return parse(to_json(fields), kind)  # raises the client's error


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Raise the block's `ApiError` with renamed fields; `names`: this server's name -> the dialect's."""
    try:
        yield
    except ApiError as error:
        raise renamed_error(error, names) from None


def renamed_error(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error with fields renamed in its message and `param`."""

    def renamed(found: re.Match[str]) -> str:
        head, path = found.groups()
        is_word = "_" not in head and not path and found.start() > 0  # "messages" is also an English word
        if head not in names or is_word:
            return found.group()
        return names[head] + ("" if head == _MOVED else path)

    return reworded(error, lambda text: _FIELD.sub(renamed, text))


def reworded(error: ApiError, reword: Callable[[str], str]) -> ApiError:
    """Return the error with its message and `param` reworded."""
    param = None if error.param is None else reword(error.param)
    text = reword(error.message)
    return ApiError(error.status, text, param=param, code=error.code, headers=error.headers, extra=error.extra)


def rename_structures(call: Call, names: Mapping[str, str]) -> Call:
    """Return a call whose structures have renamed fields, for errors of their later compilation."""

    def renamed(structure: Structure | None) -> Structure | None:
        if structure is None:
            return None
        place = _HEAD.sub(lambda found: names.get(found.group(), found.group()), structure.field)
        return structure._replace(field=place)

    return replace(
        call, requests=tuple(replace(request, structure=renamed(request.structure)) for request in call.requests)
    )


def unsupported_field(param: str, message: str | None = None) -> ApiError:
    """Return the error for a field that this server does not support."""
    text = message or f"{param} is not supported here"
    return ApiError(400, text, param=param, code="unsupported_field")


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


def translated_completion(
    fields: Mapping[str, Any], names: Mapping[str, str], model: ServedModel, config: ServerConfig, salt: str
) -> Call:
    """Return the call of a completion with these fields; its errors, also later ones, have a dialect's names.

    `names`: field of `CompletionBody` -> the dialect's. With `max_tokens` None and no default of the server, an output
    may fill the context.
    """
    is_unlimited = fields["max_tokens"] is None and config.n_predict is None
    if is_unlimited:
        fields = {**fields, "max_tokens": max(1, fields.get("min_tokens") or 0)}  # passes validation
    with renamed_errors(names):
        call = completion_call(as_body(fields, CompletionBody), model, config, salt)
    call = rename_structures(call, names)
    return fill_context(call, model.limits) if is_unlimited else call


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
