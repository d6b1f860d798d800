"""`Outbox`: what one caller's requests have produced and the caller has not read, on an event loop.

A delta of one token is an object with four tuples, about 440 bytes. A slow reader's deltas are therefore merged: then a
token is one item of four tuples.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from nano_inference.types import Delta, EngineRequest

MAX_SINGLE = 64
"""Deltas that are kept unmerged."""
MAX_MERGED = 256
"""Tokens of a merged delta, and those that `take` returns at once, so that their replies need little memory."""
_COLUMNS = ("token_ids", "logprobs", "mask", "versions", "top_logprobs", "raw_logprobs", "sampling_masks")
"""A delta's fields with one item per token; the last three are None unless requested."""


class PromptDelta(NamedTuple):
    """A delta and the index of its request among the caller's."""

    prompt_index: int
    delta: Delta


@dataclass(slots=True)
class SampleTimes:
    """Times of one sample's events: seconds on the monotonic clock, None if the event did not happen."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0


class Outbox:
    """Owns the unread deltas of one caller's requests, in the order of their steps, and the times of their samples."""

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self.requests = tuple(requests)
        self.arrived = time.monotonic()
        self.times = [[SampleTimes(self.arrived) for _ in range(one.num_samples)] for one in self.requests]
        """Indexed by request and sample."""
        self.num_samples = sum(one.num_samples for one in self.requests)
        self.ids: list[int] = []
        """The engine's ids of queued requests; accessed only on its thread."""
        self.is_closed = False
        """Whether the caller has left."""
        self.end_reason = "abort"
        """Finish reason of samples that are still open when the caller leaves."""
        self.num_unread = 0
        """Unread tokens; a delta without tokens counts as one."""
        self._unread: deque[PromptDelta] = deque()
        self._merges_at = MAX_SINGLE  # number of deltas at which they are merged
        self._num_open = self.num_samples
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """True if every sample has ended and all deltas were taken."""
        return self._num_open == 0 and not self._unread

    def put(self, prompt_index: int, delta: Delta, at: float) -> float | None:
        """Add a delta of the moment `at`; return the time of the sample's last token before it."""
        times = self.times[prompt_index][delta.sample_index]
        before = times.last_token
        if delta.token_ids:
            times.num_tokens += len(delta.token_ids)
            times.first_token = at if before is None else times.first_token
            times.last_token = at
        if delta.sample is not None:
            times.ended = at
        if self._failure is None:
            self._unread.append(PromptDelta(prompt_index, delta))
            self.num_unread += _size(delta)
            self._num_open -= delta.sample is not None
            if len(self._unread) > self._merges_at:
                self._merge()
            self._changed.set()
        return before

    def fail(self, error: Exception) -> None:
        """Let `take` raise the error from now on. The first error is kept."""
        self._failure = self._failure or error
        self._changed.set()

    def close(self) -> None:
        """Break reference cycles, so that the prompts are freed without the cyclic garbage collector.

        A raised failure refers to its caller through its traceback.
        """
        self.is_closed = True
        self._failure = None

    async def take(self, timeout: float | None = None) -> list[PromptDelta]:
        """Return the oldest unread deltas; wait up to `timeout` seconds for one, then return nothing.

        Raises the error given to `fail`.
        """
        if not self._unread and self._failure is None and self._num_open:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        taken: list[PromptDelta] = []
        size = 0
        while self._unread and (not taken or size + _size(self._unread[0].delta) <= MAX_MERGED):
            taken.append(self._unread.popleft())
            size += _size(taken[-1].delta)
        self.num_unread -= size
        self._merges_at = MAX_SINGLE + len(self._unread)
        return taken

    def _merge(self) -> None:
        """Merge deltas of the same sample up to `MAX_MERGED` tokens; only the order between samples changes."""
        pieces: dict[tuple[int, int], list[list[Delta]]] = {}
        sizes: dict[tuple[int, int], int] = {}  # of each last group
        for prompt_index, delta in self._unread:
            key, size = (prompt_index, delta.sample_index), _size(delta)
            if key not in pieces or sizes[key] + size > MAX_MERGED:
                pieces.setdefault(key, []).append([])
                sizes[key] = 0
            pieces[key][-1].append(delta)
            sizes[key] += size
        self._unread = deque(
            PromptDelta(index, _merged(group)) for (index, _), groups in pieces.items() for group in groups
        )
        self.num_unread = sum(_size(one.delta) for one in self._unread)
        self._merges_at = 2 * len(self._unread) + MAX_SINGLE


def _size(delta: Delta) -> int:
    return len(delta.token_ids) or 1


def _merged(deltas: Sequence[Delta]) -> Delta:
    """Return successive deltas of a sample as one: with the prompt's log-probabilities, without reports of progress."""
    if len(deltas) == 1:
        return deltas[0]

    def joined(name: str) -> tuple[object, ...] | None:
        columns: list[Iterable[object] | None] = [getattr(one, name) for one in deltas]
        if all(column is None for column in columns):
            return None
        return tuple(chain.from_iterable(column for column in columns if column is not None))

    prefills = [one.prefill for one in deltas if one.prefill is not None and one.prefill.logprobs is not None]
    columns: dict[str, Any] = {name: joined(name) for name in _COLUMNS}
    return replace(deltas[-1], prefill=prefills[0] if prefills else None, **columns)
