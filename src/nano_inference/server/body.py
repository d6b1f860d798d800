"""Parses a request body: strict JSON, then the schema. Every error names its field."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from nano_inference.server.errors import ApiError
from nano_inference.server.schema import Body

MAX_DEPTH = 64
MAX_NAME = 200
"""Characters of a field's path in an error."""
_MAX_SIBLINGS = 8

_LIMITS = frozenset(
    {
        *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_long", "too_short"),
        *("string_too_long", "string_too_short", "string_pattern_mismatch", "literal_error"),
    }
)
"""pydantic's errors for values of the right type."""

_Body = TypeVar("_Body", bound=Body)


def parse(data: bytes, model: type[_Body]) -> _Body:
    """Return the body. Raises `ApiError` if it is not a JSON object or does not match the schema.

    Its status is 400, or the model's `malformed_status` unless a value is only beyond a limit.
    """
    value = read_json(data, model.malformed_status)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _schema_error(error, value, model.malformed_status) from None


def read_json(data: bytes, status: int = 400) -> dict[str, Any]:
    """Return a JSON object: no NaN, no infinity, no lone surrogate, `MAX_DEPTH` levels at most.

    Raises `ApiError` with the status.
    """
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(status, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        kind = kinds.get(type(value), "a number")
        raise ApiError(status, f"the body must be a JSON object, got {kind}", code="invalid_json")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _schema_error(error: ValidationError, value: dict[str, Any], malformed_status: int) -> ApiError:
    """Return the client's error for one of pydantic's; others than of limits come first if they have another status.

    For a value that matches no member of a union, that is the error with the longest path, or else one of a member
    whose type the value has.
    """
    found = error.errors(include_url=False, include_context=False, include_input=True)
    status = 400
    malformed = [one for one in found if one["type"] not in _LIMITS]
    if malformed and malformed_status != 400:
        found, status = malformed, malformed_status
    chosen = max(found, key=lambda one: (len(_path(one, value)), not one["type"].endswith("_type")))
    own = _path(chosen, value)
    name = _spelled(own)
    is_object = chosen["type"] in ("model_type", "model_attributes_type", "dict_type")
    text = (chosen["msg"][:1].lower() + chosen["msg"][1:]).replace(" after validation", "")
    message = "input should be an object" if is_object else text
    got = "" if chosen["type"] == "missing" else f", got {_shown(chosen['input'])}"
    # Other fields of the same object or list with the same error.
    paths = [_path(one, value) for one in found if one["type"] == chosen["type"]]
    others = list(dict.fromkeys(_spelled(path) for path in paths if path[:-1] == own[:-1] and path != own))
    also = f"; also {', '.join(others[:_MAX_SIBLINGS])}{', …' if others[_MAX_SIBLINGS:] else ''}" if others else ""
    return ApiError(status, f"{name}: {message}{got}{also}", param=name or None)


def _spelled(path: Sequence[int | str]) -> str:
    return ".".join(str(part)[:64] for part in path)[:MAX_NAME]


def _path(error: ErrorDetails, value: Any) -> list[int | str]:
    """Return the names and indices in an error's location that exist in the body, and the name of a missing field.

    pydantic's location also has the names of a union's members, such as "str" or "function-after[check(), list]". The
    body may have a field of the same name: the path ends at the value that the error is about.
    """
    path: list[int | str] = []
    known = 0
    for part in error["loc"]:
        if isinstance(value, dict):
            inside = part in value
        else:
            inside = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside:
            path.append(part)
            value = value[part]
            known = len(path) if value is error["input"] else known
    if error["type"] == "missing":
        return [*path[: known or None], error["loc"][-1]]
    return path[: known or None]


def _shown(value: Any) -> str:
    """Return the start of a value as text; does not read more of the value than it shows."""
    brief = Repr()
    brief.maxlevel, brief.maxstring, brief.maxlong = 2, 80, 60
    text = brief.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
