"""What rank 0 sends of the rows of a step: those that are new, and what others differ by from the step before.

A row of a running request has a new token and position and sometimes a block; its parameters, block table and history
are large. For 256 rows with 40 blocks each they take longer to write and read than a GPU takes for several tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nano_inference.core.step import Row

Change = tuple[int, int, Any]
"""A field's index, how many values of its former tuple remain, and what is behind them; -1: the whole value."""
Sent = Row | tuple[int, list[Change]]
"""A new row, or a row's id and its changes."""


class SentRows:
    """Owns the rows of the latest step, the same on rank 0 and on the others."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def write(self, rows: Sequence[Row]) -> list[Sent]:
        """Return what `read` needs on the other ranks."""
        found: list[Sent] = []
        for row in rows:
            former = self._rows.get(row.id)
            found.append(row if former is None else (row.id, _changes(former, row)))
        self._rows = {row.id: row for row in rows}
        return found

    def read(self, sent: Sequence[Sent]) -> tuple[Row, ...]:
        """Return the rows of a step."""
        rows = tuple(one if isinstance(one, Row) else _changed(self._rows[one[0]], one[1]) for one in sent)
        self._rows = {row.id: row for row in rows}
        return rows


def _changes(former: Row, row: Row) -> list[Change]:
    found: list[Change] = []
    pairs: Iterable[tuple[Any, Any]] = zip(former, row, strict=True)
    for index, (old, new) in enumerate(pairs):
        if new is old or new == old:
            continue
        size = len(old) if isinstance(old, tuple) else 0
        is_longer = size > 0 and isinstance(new, tuple) and new[:size] == old
        found.append((index, size, new[size:]) if is_longer else (index, -1, new))
    return found


def _changed(former: Row, changes: list[Change]) -> Row:
    fields: list[Any] = list(former)
    for index, size, value in changes:
        fields[index] = value if size < 0 else (*fields[index], *value)
    return Row._make(fields)
