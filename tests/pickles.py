"""A value that is read from a pickle by a call of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Runs:
    """Unpickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self._call
