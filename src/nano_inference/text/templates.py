"""Types for a model's chat templates and their renderers; does not import MiniJinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nano_inference.types import ModelError


class TemplateLimit(ModelError):
    """A rendering exceeded a limit on time, memory or output; `reason` is the message without the file's name."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.reason = reason


class Templates(NamedTuple):
    """The templates of one model, as sent to a worker process."""

    where: str
    """The templates' file, for error messages."""
    sources: Mapping[str, str]
    """Template texts by name: "default", and "tool_use" if the model has one."""
    fuel: int
    """Limit on MiniJinja's steps in one rendering."""


class Renderer(Protocol):
    """Renders one model's templates outside this process."""

    def render(self, name: str, data: Mapping[str, Any]) -> str:
        """Return the text of one rendering. Raises `BadRequest` and `TemplateLimit`."""

    def close(self) -> None:
        """End the worker processes; later calls of `render` raise `RuntimeError`."""


def size_of(value: Any, limit: int) -> int:
    """Return the approximate number of characters in a JSON value; counting stops once it exceeds `limit`."""
    total, rest = 0, [value]
    while rest and total <= limit:
        item = rest.pop()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence) and not isinstance(item, str):
            rest += item
    return total
