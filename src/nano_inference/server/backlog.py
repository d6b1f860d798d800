"""Deltas of one call that its client has not read: the first ones as they are, later ones merged to save memory.

A delta of one token is an object with four tuples, about 440 bytes; merged, its token is one item of four lists.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nano_inference.types import Delta, Prefill, TrainingSample

MAX_SINGLE = 64
"""Deltas that are kept unmerged."""
MAX_MERGED = 256
"""Merged tokens returned at once: their events stay in memory until the client has read them."""
_FIELDS = ("token_ids", "logprobs", "mask", "versions", "top_logprobs", "raw_logprobs", "sampling_masks")
"""A delta's fields with one item per token; the last three are None unless requested."""


class PromptDelta(NamedTuple):
    """A delta and the index of its prompt in the ticket."""

    prompt_index: int
    delta: Delta


@dataclass(slots=True)
class _Merged:
    """The unread merged tokens of one sample."""

    request_id: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sample: TrainingSample | None = None
    prefill: Prefill | None = None
    """With the prompt's log-probabilities, which an echo needs; reports of progress are dropped."""

    def add(self, delta: Delta) -> None:
        for name in _FIELDS:
            values = getattr(delta, name)
            if values is not None:
                self.columns.setdefault(name, []).extend(values)
        self.sample = delta.sample or self.sample
        if delta.prefill is not None and delta.prefill.logprobs is not None:
            self.prefill = delta.prefill

    def cut(self, sample_index: int, most: int) -> Delta:
        """Remove and return the first `most` tokens as one delta; the last such delta has the sample."""
        columns = {name: tuple(values[:most]) for name, values in self.columns.items()}
        for values in self.columns.values():
            del values[:most]
        sample = None if self.columns["token_ids"] else self.sample
        prefill, self.prefill = self.prefill, None
        return Delta(request_id=self.request_id, sample_index=sample_index, sample=sample, prefill=prefill, **columns)


class Backlog:
    """Owns the unread deltas. Keeps the order of one sample's tokens, not the order between samples."""

    def __init__(self) -> None:
        self._single: deque[PromptDelta] = deque()
        self._merged: dict[tuple[int, int], _Merged] = {}
        self.num_tokens = 0
        """Unread tokens; a delta without tokens counts as one."""

    def __bool__(self) -> bool:
        return bool(self._single or self._merged)

    def put(self, prompt_index: int, delta: Delta) -> None:
        self.num_tokens += len(delta.token_ids) or 1
        if not self._merged and len(self._single) < MAX_SINGLE:
            self._single.append(PromptDelta(prompt_index, delta))
            return
        key = (prompt_index, delta.sample_index)
        merged = self._merged.get(key)
        if merged is None:
            merged = self._merged[key] = _Merged(delta.request_id)
        merged.add(delta)

    def take(self) -> list[PromptDelta]:
        """Remove and return the oldest deltas: all unmerged ones, or else up to `MAX_MERGED` merged tokens."""
        if self._single:
            taken = list(self._single)
            self._single.clear()
        else:
            taken = self._take_merged()
        self.num_tokens = self._count() if self else 0
        return taken

    def _take_merged(self) -> list[PromptDelta]:
        taken: list[PromptDelta] = []
        room = MAX_MERGED
        for key, merged in tuple(self._merged.items()):
            delta = merged.cut(key[1], room)
            taken.append(PromptDelta(key[0], delta))
            room -= len(delta.token_ids)
            if not merged.columns["token_ids"]:
                del self._merged[key]
            if room <= 0:
                break
        return taken

    def _count(self) -> int:
        single = sum(len(one.delta.token_ids) or 1 for one in self._single)
        return single + sum(len(merged.columns["token_ids"]) or 1 for merged in self._merged.values())
