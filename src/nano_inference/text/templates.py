"""A model's chat templates before they are compiled, and what renders them; imports no MiniJinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nano_inference.types import ModelError


class TemplateLimit(ModelError):
    """A rendering exceeded a limit of time, memory or text; `reason` says which, without the file's name."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.reason = reason


class Templates(NamedTuple):
    """The templates of one model, as they are sent to a worker process."""

    where: str
    """The file they are from, for error messages."""
    sources: Mapping[str, str]
    """"default", and "tool_use" if the model has one."""
    fuel: int
    """MiniJinja's steps in one rendering."""


class Renderer(Protocol):
    """Renders one model's templates, outside this process."""

    def render(self, name: str, data: Mapping[str, Any]) -> str:
        """Return the text of one rendering. Raises `BadRequest` and `TemplateLimit`."""

    def close(self) -> None:
        """End what renders; later calls raise `RuntimeError`."""


def size_of(value: Any, limit: int) -> int:
    """Return about how many characters a value would print; stop counting beyond `limit`."""
    total, rest = 0, [value]
    while rest and total <= limit:
        item = rest.pop()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence) and not isinstance(item, str):
            rest += item
    return total
