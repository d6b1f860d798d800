"""`RowCoder`: rows as values of JSON, sent as differences from earlier steps. No torch."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from nano_inference.core.step import Row
from nano_inference.types import SamplingParams

_GROWING = ("blocks", "history")  # fields that usually extend their earlier value: only the new end is sent
_KEPT_ROWS = 1024  # rows that both sides remember beside those of the latest step


class RowCoder:
    """Owns the latest version of each row; the writer's and the reader's are equal after every step."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Row] = OrderedDict()

    def written(self, rows: Sequence[Row]) -> list[Any]:
        """Return for each row its id and the fields that differ, {field: value}; remember them.

        A field of `_GROWING` is [entries kept, further entries].
        """
        found = []
        for row in rows:
            old = self._known.get(row.id)
            changes: dict[str, Any] = {}
            for name in Row._fields:
                value: Any = getattr(row, name)
                before = None if old is None else getattr(old, name)
                if old is not None and (value is before or value == before):
                    continue
                if name in _GROWING:
                    num_kept = len(before) if before and value[: len(before)] == before else 0
                    value = [num_kept, value[num_kept:]]
                elif isinstance(value, SamplingParams):
                    value = value.to_dict()
                elif isinstance(value, bytes):
                    value = b64encode(value).decode("ascii")
                elif isinstance(value, frozenset):
                    value = sorted(value)
                changes[name] = value
            found.append([row.id, changes])
        self._remember(rows)
        return found

    def read(self, found: Sequence[Any]) -> tuple[Row, ...]:
        """Return the rows that `written` described, and remember them."""
        rows = []
        for row_id, changes in found:
            old = self._known.get(row_id)
            for name, value in changes.items():
                if name in _GROWING:
                    num_kept, end = value
                    value = (*getattr(old, name)[:num_kept], *end) if num_kept else tuple(end)
                elif name == "params":
                    value = SamplingParams.from_dict(value)
                elif name == "mask" and value is not None:
                    value = b64decode(value)
                elif name == "stop_ids":
                    value = frozenset(value)
                elif isinstance(value, list):
                    value = tuple(value)
                changes[name] = value
            rows.append(Row(**changes) if old is None else old._replace(**changes))
        self._remember(rows)
        return tuple(rows)

    def _remember(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._known[row.id] = row
            self._known.move_to_end(row.id)
        while len(self._known) > len(rows) + _KEPT_ROWS:
            self._known.popitem(last=False)
