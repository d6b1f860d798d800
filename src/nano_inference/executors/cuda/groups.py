"""Finds decode rows that share a prefix of cache blocks, so that attention reads its keys once.

Shapes: R rows, Q tiles of rows, X rows per tile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nano_inference.executors.cuda.records import SPLIT
from nano_inference.runner import Row

Placed = Sequence[tuple[int, Row]]  # pairs of slot and row


class Prefix(NamedTuple):
    """Slots whose rows have the same first positions."""

    slots: tuple[int, ...]
    num_shared: int  # positions, a multiple of `SPLIT`


def shared_prefixes(placed: Placed, block_size: int) -> list[Prefix]:
    """Return the groups of two rows or more that share at least one split."""
    num_blocks = -(-SPLIT // block_size)
    by_start: defaultdict[tuple[int, ...], list[tuple[int, Row]]] = defaultdict(list)
    long = [(slot, row) for slot, row in placed if row.start >= SPLIT]
    if len({row.blocks[0] for _, row in long}) == len(long):
        return []  # the usual case, found without reading more than a block of each row
    for slot, row in long:
        by_start[row.blocks[:num_blocks]].append((slot, row))
    found = []
    for group in by_start.values():
        if len(group) > 1 and (num_shared := _num_shared([row for _, row in group], block_size)):
            found.append(Prefix(tuple(slot for slot, _ in group), num_shared))
    return found


def _num_shared(rows: Sequence[Row], block_size: int) -> int:
    """Return how many positions, in whole splits, all rows share."""
    tables = [row.blocks for row in rows]
    first, last = min(tables), max(tables)  # what these two share, all tables between them share
    num_common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, tables)))
    computed = min(row.start for row in rows)
    return min(num_common * block_size, computed) // SPLIT * SPLIT


class GroupTables(NamedTuple):
    """What `Rows.shared_R` and `Groups` hold; int32."""

    shared_R: npt.NDArray[np.int32]
    row_QX: npt.NDArray[np.int32]
    shared_Q: npt.NDArray[np.int32]


def group_tables(prefixes: Sequence[Prefix], num_rows: int, num_tiles: int, width: int) -> GroupTables:
    """Divide groups into tiles of `width` rows."""
    shared_R = np.zeros(num_rows, np.int32)
    row_QX = np.full((num_tiles, width), -1, np.int32)
    shared_Q = np.zeros(num_tiles, np.int32)
    for index, (slots, num_shared) in enumerate(_tiles(prefixes, width)):
        shared_R[list(slots)] = num_shared
        row_QX[index, : len(slots)] = slots
        shared_Q[index] = num_shared
    return GroupTables(shared_R, row_QX, shared_Q)


def _tiles(prefixes: Sequence[Prefix], width: int) -> Iterator[Prefix]:
    for slots, num_shared in prefixes:
        for start in range(0, len(slots), width):
            yield Prefix(slots[start : start + width], num_shared)
