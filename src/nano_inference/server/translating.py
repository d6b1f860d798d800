"""What the dialects of other servers share: refusals told in their names, calls as they mean them. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from nano_inference.admission import Limits
from nano_inference.server.body import parse
from nano_inference.server.call import Call
from nano_inference.server.errors import ApiError
from nano_inference.server.schema import Body
from nano_inference.server.structured import Structure
from nano_inference.server.unsupported import is_one_of, refuse_unsupported

_WORD = re.compile(r"^[a-z]+(?=[ :.\[])|[a-z]+(?:_[a-z]+)+")
"""What can be a field's name in a refusal: a text begins with one, and one of several words stands anywhere."""
_HEAD = re.compile(r"^[a-z_]+")
_B = TypeVar("_B", bound=Body)


def as_body(fields: Mapping[str, Any], kind: type[_B]) -> _B:
    """Return a body with these fields. Raises `ApiError` naming the one that does not fit."""
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return parse(to_json(fields), kind)  # which says what is wrong in a client's words


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Raise what is refused in the block with a client's own names of fields; `names` are ours to theirs."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return a refusal with other names of fields, in its text and as the field that is wrong."""
    param = error.param
    if param is not None:
        param = _HEAD.sub(lambda found: names.get(found.group(), found.group()), param)
    text = _WORD.sub(lambda found: names.get(found.group(), found.group()), error.message)
    return ApiError(error.status, text, param=param, code=error.code, headers=error.headers, extra=error.extra)


def reworded(error: ApiError, reword: Callable[[str], str]) -> ApiError:
    """Return the error with `reword` applied to its message and to the name of its field."""
    param = None if error.param is None else reword(error.param)
    text = reword(error.message)
    return ApiError(error.status, text, param=param, code=error.code, headers=error.headers, extra=error.extra)


@contextmanager
def errors_reworded(reword: Callable[[str], str]) -> Iterator[None]:
    """Raise every `ApiError` of the block with `reword` applied."""
    try:
        yield
    except ApiError as error:
        raise reworded(error, reword) from None


def structures_told_as(call: Call, names: Mapping[str, str]) -> Call:
    """Return a call whose structures are told of by other names of their fields: they are compiled later."""

    def told(structure: Structure | None) -> Structure | None:
        if structure is None:
            return None
        return structure._replace(field=_HEAD.sub(lambda f: names.get(f.group(), f.group()), structure.field))

    return replace(
        call, requests=tuple(replace(request, structure=told(request.structure)) for request in call.requests)
    )


def refuse(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raise `ApiError` naming the first known field whose value is none of those with which it changes nothing."""
    for name, value in fields.items():
        if name in neutral and not is_one_of(value, neutral[name]):
            place = f"{where}{name}"
            raise ApiError(400, f"{place} is not supported by this server", param=place, code="unsupported_field")


def refuse_foreign(body: Body, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise as `refuse` does for a body's undeclared fields, then as `refuse_unsupported` for the others."""
    extra = body.model_extra or {}
    refuse(extra, neutral)
    refuse_unsupported({name: value for name, value in extra.items() if name not in neutral})


def refuse_unknown(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise as `refuse` does, and for a name that is not known at all: a mistyped one must not go unnoticed."""
    refuse(fields, neutral, where)
    for name in fields:
        if name not in neutral:
            place = f"{where}{name[:64]}"
            raise ApiError(400, f"{place} is not a field of it", param=place, code="unknown_field")


def given(body: Body) -> dict[str, Any]:
    """Return a body's known fields: what was sent, or else its default; without those that are None either way."""
    values: dict[str, Any] = {}
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        values[name] = field.default if value is None else value
    return {name: value for name, value in values.items() if value is not None}


def roomy(call: Call, limits: Limits) -> Call:
    """Return a call whose answers may take all the room that their prompts leave."""
    room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    requests = tuple(replace(request, params=replace(request.params, max_tokens=None)) for request in call.requests)
    num_tokens = sum(len(request.prompt) + request.num_samples * (room - len(request.prompt)) for request in requests)
    return replace(call, requests=requests, num_tokens=num_tokens)


def uncached(call: Call) -> Call:
    """Return a call that shares no cached prefix with any other."""
    requests = tuple(replace(request, salt=f"{request.salt}#{uuid.uuid4().hex}") for request in call.requests)
    return replace(call, requests=requests)
