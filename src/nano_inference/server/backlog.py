"""Deltas of one call that its client has not read: a few as they came, the rest merged, so that a token takes little.

A delta of one token is an object and four tuples, about 440 bytes; merged, its token is a place in four arrays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nano_inference.types import Delta, TrainingSample

MAX_SINGLE = 64
"""Deltas that are kept as they came."""
MAX_MERGED = 256
"""Tokens that are taken at once: what is made of them waits in memory until the client has read it."""
_FIELDS = ("token_ids", "logprobs", "mask", "versions", "top_logprobs", "raw_logprobs", "sampling_masks")
"""A delta's fields that have one item for each token; the last three are None where they were not asked for."""


class Piece(NamedTuple):
    """One delta, and which of the ticket's prompts it belongs to."""

    prompt_index: int
    delta: Delta


@dataclass(slots=True)
class _Merged:
    """The tokens of one sample that were not taken."""

    request_id: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sample: TrainingSample | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta's tokens."""
        for name in _FIELDS:
            values = getattr(delta, name)
            if values is not None:
                self.columns.setdefault(name, []).extend(values)
        self.sample = delta.sample or self.sample

    def cut(self, sample_index: int, most: int) -> Delta:
        """Remove and return the first `most` tokens as one delta, the last of which has the sample."""
        columns = {name: tuple(values[:most]) for name, values in self.columns.items()}
        for values in self.columns.values():
            del values[:most]
        sample = None if self.columns["token_ids"] else self.sample
        return Delta(request_id=self.request_id, sample_index=sample_index, sample=sample, **columns)


class Backlog:
    """Owns what was put in and not taken. The order of one sample's tokens is kept, that between samples is not."""

    def __init__(self) -> None:
        self._single: deque[Piece] = deque()
        self._merged: dict[tuple[int, int], _Merged] = {}
        self.num_tokens = 0
        """Tokens that wait; a delta without any counts as one."""

    def __bool__(self) -> bool:
        return bool(self._single or self._merged)

    def put(self, prompt_index: int, delta: Delta) -> None:
        """Add a delta."""
        self.num_tokens += len(delta.token_ids) or 1
        if not self._merged and len(self._single) < MAX_SINGLE:
            self._single.append(Piece(prompt_index, delta))
            return
        key = (prompt_index, delta.sample_index)
        merged = self._merged.get(key)
        if merged is None:
            merged = self._merged[key] = _Merged(delta.request_id)
        merged.add(delta)

    def take(self) -> list[Piece]:
        """Remove and return what came first: all single deltas, or else some merged ones."""
        if self._single:
            pieces = list(self._single)
            self._single.clear()
        else:
            pieces = self._take_merged()
        self.num_tokens = self._count() if self else 0
        return pieces

    def _take_merged(self) -> list[Piece]:
        pieces: list[Piece] = []
        room = MAX_MERGED
        for key, merged in tuple(self._merged.items()):
            delta = merged.cut(key[1], room)
            pieces.append(Piece(key[0], delta))
            room -= len(delta.token_ids)
            if not merged.columns["token_ids"]:
                del self._merged[key]
            if room <= 0:
                break
        return pieces

    def _count(self) -> int:
        single = sum(len(piece.delta.token_ids) or 1 for piece in self._single)
        return single + sum(len(merged.columns["token_ids"]) or 1 for merged in self._merged.values())
