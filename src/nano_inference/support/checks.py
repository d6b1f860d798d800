"""Checks of single values and of a record's fields, with errors that name the field; small conversions. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from nano_inference.support.errors import BadRequest

Check = Callable[[str, Any], object]
"""Raises `BadRequest`, naming its first argument, if the second is invalid."""
SEEDS = (-(2**63), 2**64 - 1)
"""Lowest and highest seed."""
Record = TypeVar("Record")
_MOST_ITEMS = 8


def _invalid(name: str, text: str) -> BadRequest:
    """Return the error of a field, or of an item in it: "stop_token_ids: a token id"."""
    field, _, item = name.partition(": ")
    return BadRequest(field, f"{item} {text}" if item else text)


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise `BadRequest` naming `name` unless `value` is a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _invalid(name, f"must be a number, got {value!r}")
    if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
        bracket = "(" if open_low else "["
        raise _invalid(name, f"must be in {bracket}{low:g}, {high:g}], got {value!r}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise `BadRequest` naming `name` unless `value` is an integer of at least `low` (and at most `high`)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise _invalid(name, f"must be {limit}, got {value}")


def check_bool(name: str, value: object) -> None:
    """Raise `BadRequest` naming `name` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise _invalid(name, f"must be true or false, got {value!r}")


def check_text(name: str, value: object) -> None:
    """Raise `BadRequest` naming `name` unless `value` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise _invalid(name, f"must be a non-empty string, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise `BadRequest` naming `name` unless `value` is one of the choices."""
    if value not in choices:
        raise _invalid(name, f"must be one of {', '.join(choices)}, got {value!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name that is most like a wrong one, else the empty string."""
    close = get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def brief_repr(record: Any) -> str:
    """Return a dataclass's repr without fields that have their default; of a long sequence its beginning and length."""
    shown = []
    for one in fields(record):
        value = getattr(record, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        is_empty = isinstance(value, Collection) and not value and not default
        if value != default and not is_empty:
            is_long = isinstance(value, tuple | list) and len(value) > _MOST_ITEMS
            begin = f"({', '.join(map(repr, value[:_MOST_ITEMS]))}, … {len(value)} in all)" if is_long else ""
            shown.append(f"{one.name}={begin or repr(value)}")
    return f"{type(record).__name__}({', '.join(shown)})"


def check_label(name: str, value: object) -> None:
    """Raise `BadRequest` naming `name` unless `value` is an integer or a string."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _invalid(name, f"must be an integer or a string, got {value!r}")


def integer(low: int, high: int | None = None) -> Check:
    """Return the check for integers of at least `low` (and at most `high`)."""
    return partial(check_int, low=low, high=high)


def number(low: float, high: float, *, open_low: bool = False) -> Check:
    """Return the check for numbers in [low, high] (or (low, high])."""
    return partial(check_number, low=low, high=high, open_low=open_low)


def checked(default: Any, check: Check) -> Any:
    """Return a dataclass field with a default, and the check that `check_fields` applies to its values."""
    return field(default=default, metadata={"check": check})


def check_fields(record: Any) -> None:
    """Raise `BadRequest` naming the first invalid field of a dataclass; None is valid where the annotation has it.

    Fields have the check that they were made with (`checked`), or that of their annotation: `bool` or `Literal`.
    """
    for name, check, is_optional in _checks_of(record.__class__):
        value = getattr(record, name)
        if value is not None or not is_optional:
            check(name, value)


@cache
def _checks_of(cls: type[Any]) -> tuple[tuple[str, Check, bool], ...]:
    """Return (name, check, whether None is valid) for each field of a dataclass that is checked."""
    found: list[tuple[str, Check, bool]] = []
    hints = get_type_hints(cls)
    for one in fields(cls):
        hint = hints[one.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        check = partial(check_choice, choices=choices) if choices else one.metadata.get("check")
        check = check_bool if hint is bool else check
        if check is not None:
            found.append((one.name, check, NoneType in kinds))
    return tuple(found)


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """Return `values` as a tuple of token ids. Raises `BadRequest` naming `name` and the first invalid id."""
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise BadRequest(name, f"must be a collection of token ids, got {type(values).__name__}")
    ids = tuple(values)
    for value in ids:
        if type(value) is not int or value < 0:
            check_int(f"{name}: a token id", value, 0)
    return ids


def float32(values: Iterable[float]) -> tuple[float, ...]:
    """Return each number rounded to float32; too large ones become infinite."""
    return tuple(array("f", values))


def unit_vector(values: Sequence[float]) -> tuple[float, ...]:
    """Return the vector scaled to length 1, in float32; a zero vector is returned unchanged."""
    length = math.hypot(*values)
    return float32(value / length for value in values) if length else tuple(values)


def from_known(cls: type[Record], data: Mapping[str, Any]) -> Record:
    """Build the dataclass `cls` from a JSON object. Raises `BadRequest` naming an unknown field."""
    known = {f.name for f in fields(cast(Any, cls)) if f.init}
    for name in data:
        if name not in known:
            raise BadRequest("", f"{cls.__name__} has no field {name!r}; known: {', '.join(sorted(known))}")
    return cls(**data)


def checked_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Return a logit bias with integer ids and finite values; JSON's string keys are converted."""
    if not isinstance(bias, Mapping):
        raise BadRequest("logit_bias", f"must map token ids to numbers, got {type(bias).__name__}")
    out: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        check_int("logit_bias: a token id", token, 0)
        check_number(f"logit_bias[{token}]", value, -1e6, 1e6)
        out[token] = float(value)
    return out


def checked_stops(stop: object) -> tuple[str, ...]:
    """Return stop strings as a tuple of non-empty strings."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
        raise BadRequest("stop", f"must be a string or a list of strings, got {stop!r}")
    if "" in stops:
        raise BadRequest("stop", "must not hold an empty string")
    return tuple(stops)
