"""Methods and attributes of values that nanochat's calculator evaluates, with bounds on sizes. No torch.

Only methods in these tables are called, on values of exactly these types. They have no side effects beyond their own
subject, and their time is bounded by the sizes of the texts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT = 8192
"""Most characters of a text, checked before padding and joining. `rfind` of two such texts takes about 30 ms."""

_ANY_TEXT = (
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
    *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower"),
    *("lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_FORMATTING = frozenset({"format", "format_map"})
_WHOLE = ("as_integer_ratio", "bit_count", "bit_length", "conjugate")
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({*_ANY_TEXT, *_PADDING, *_FORMATTING, "expandtabs", "join", "translate"}),
    list: frozenset({"append", "clear", "copy", "count", "extend", "index", "pop", "remove", "reverse", "sort"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(_WHOLE),
    bool: frozenset(_WHOLE),
    float: frozenset({"as_integer_ratio", "conjugate", "fromhex", "hex", "is_integer"}),
}
_ATTRIBUTES: Mapping[type, frozenset[str]] = {
    int: frozenset({"real", "imag", "numerator", "denominator"}),
    bool: frozenset({"real", "imag", "numerator", "denominator"}),
    float: frozenset({"real", "imag"}),
}


class Refused(Exception):
    """The expression is not supported, or a value is too large."""


def call(name: str, subject: Any, *arguments: Any) -> Any:
    """Call a method with at most one argument. Raises `Refused`, and whatever the method raises."""
    if name not in _METHODS.get(type(subject), frozenset()):
        raise Refused
    if isinstance(subject, str):
        _check_text(name, subject, *arguments)
    value = operator.methodcaller(name, *arguments)(subject)
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise Refused
    return value


def attribute(name: str, subject: Any) -> Any:
    """Return a number's attribute. Raises `Refused` for others: methods are no values here."""
    if name not in _ATTRIBUTES.get(type(subject), frozenset()):
        raise Refused
    return getattr(subject, name)


def _check_text(name: str, subject: str, argument: Any = None) -> None:
    """Raise `Refused` if a method of a text could take much memory or run a format."""
    if name in _PADDING and isinstance(argument, int):
        is_refused = argument > MAX_TEXT
    elif name == "expandtabs":
        size = argument if isinstance(argument, int) else 8
        is_refused = len(subject) + subject.count("\t") * max(size, 0) > MAX_TEXT
    elif name == "join" and isinstance(argument, str | list | tuple):
        is_refused = sum(len(part) + len(subject) for part in filter(_is_text, argument)) > 2 * MAX_TEXT
    elif name in _FORMATTING:
        is_refused = "{" in subject or "}" in subject
    else:
        longest = max(map(len, filter(_is_text, argument)), default=0) if isinstance(argument, list | tuple) else 1
        is_refused = name == "translate" and len(subject) * longest > MAX_TEXT
    if is_refused:
        raise Refused


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda left, right: left in right,
    "NotIn": lambda left, right: left not in right,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
"""Name of a comparison's node -> its function."""
