"""Read-only copies of JSON data for chat templates.

MiniJinja lets a template call the methods of Python's lists and dicts, such as `extend` and `update`. These views have
no such methods and print as the list or dict does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_inference.types import BadRequest


class ListView(Sequence[Any]):
    """A read-only list."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: Any) -> Any:
        return ListView(self._items[at]) if isinstance(at, slice) else self._items[at]

    def __repr__(self) -> str:
        return repr(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, ListView) else other)

    def __hash__(self) -> int:
        return hash(tuple(self._items))


class MapView(Mapping[str, Any]):
    """A read-only dict."""

    __slots__ = ("_items",)

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __repr__(self) -> str:
        return repr(self._items)


def view(value: object, name: str, depth: int = 64) -> Any:
    """Return JSON data as views. Raises `BadRequest` naming `name` for other types and for too deep nesting."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if depth == 0:
        raise BadRequest(f"{name} is nested too deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return MapView({key: view(item, name, depth - 1) for key, item in value.items()})
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return ListView([view(item, name, depth - 1) for item in value])
    raise BadRequest(f"{name} must hold JSON values only, not {type(value).__name__}")


def unview(value: object) -> Any:
    """Return a view's list or dict, one level deep: the `default` of `json.dumps`."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
