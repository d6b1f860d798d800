"""Messages of rank 0 to the other ranks, as JSON; rows are sent as differences from earlier steps. No torch."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.core.step import Row
from nano_inference.types import SamplingParams

_GROWING = frozenset({"blocks", "history"})  # fields that usually extend their earlier value: only the new end is sent
_KEPT_ROWS = 1024  # rows that both sides remember beside those of the latest step


def pack(command: str, arguments: Mapping[str, Any]) -> bytes:
    """Return a command as bytes."""
    return json.dumps([command, arguments], separators=(",", ":")).encode()


def unpack(message: bytes) -> tuple[str, dict[str, Any]]:
    """Return a command and its arguments."""
    command, arguments = json.loads(message)
    return command, arguments


class RowCoder:
    """Owns the latest version of each row; the writer's and the reader's are equal after every step."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Row] = OrderedDict()

    def written(self, rows: Sequence[Row]) -> list[Any]:
        """Return rows as JSON values: [id, {field: value}], and remember them."""
        found = [[row.id, _changes(self._known.get(row.id), row)] for row in rows]
        self._remember(rows)
        return found

    def read(self, found: Sequence[Any]) -> tuple[Row, ...]:
        """Return the rows that `written` described, and remember them."""
        rows = tuple(_changed(self._known.get(row_id), row_id, changes) for row_id, changes in found)
        self._remember(rows)
        return rows

    def _remember(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._known[row.id] = row
            self._known.move_to_end(row.id)
        while len(self._known) > len(rows) + _KEPT_ROWS:
            self._known.popitem(last=False)


def _changes(old: Row | None, new: Row) -> dict[str, Any]:
    """Return the fields that differ; one that grew as ["+", new end]."""
    changes: dict[str, Any] = {}
    for name in Row._fields:
        value = getattr(new, name)
        before = None if old is None else getattr(old, name)
        if old is not None and (value is before or value == before):
            continue
        if name in _GROWING and before and value[: len(before)] == before:
            changes[name] = ["+", value[len(before) :]]
        elif name in _GROWING:
            changes[name] = ["=", value]
        else:
            changes[name] = _as_json(value)
    return changes


def _changed(old: Row | None, row_id: int, changes: Mapping[str, Any]) -> Row:
    values = {name: _value_of(name, value, old) for name, value in changes.items()}
    return Row(**values) if old is None else old._replace(**values)


def _as_json(value: Any) -> Any:
    if isinstance(value, SamplingParams):
        return value.to_dict()
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    return sorted(value) if isinstance(value, frozenset) else value


def _value_of(name: str, value: Any, old: Row | None) -> Any:
    if name in _GROWING:
        how, end = value
        return (getattr(old, name) if how == "+" else ()) + tuple(end)
    if name == "params":
        return SamplingParams.from_dict(value)
    if name == "mask":
        return None if value is None else b64decode(value)
    if name == "stop_ids":
        return frozenset(value)
    return tuple(value) if isinstance(value, list) else value
