"""Checks of single values, with errors that name the field, and small conversions. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise `ValueError` naming `name` unless `value` is a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise `ValueError` naming `name` unless `value` is an integer of at least `low` (and at most `high`)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {limit}, got {value}")


def check_bool(name: str, value: object) -> None:
    """Raise `ValueError` naming `name` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_label(name: str, value: object) -> None:
    """Raise `ValueError` naming `name` unless `value` is an integer or a string."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name} must be an integer or a string, got {value!r}")


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """Return `values` as a tuple of token ids. Raises `ValueError` naming `name` and the first invalid id."""
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise ValueError(f"{name} must be a collection of token ids, got {type(values).__name__}")
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


def from_known(cls: type[Any], data: Mapping[str, Any]) -> Any:
    """Build the dataclass `cls` from a JSON object. Raises `ValueError` naming an unknown field."""
    known = {f.name for f in fields(cls) if f.init}
    for name in data:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no field {name!r}; known: {', '.join(sorted(known))}")
    return cls(**data)


def checked_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Return a logit bias with integer ids and finite values; JSON's string keys are converted."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}")
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
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in stops:
        raise ValueError("stop must not hold an empty string")
    return tuple(stops)
