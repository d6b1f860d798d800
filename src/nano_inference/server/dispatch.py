"""Passes admitted requests to the engine, fairly between clients. Runs on the event loop.

The engine serves its own queue first come, first served. That queue is kept short: a request waits here until a seat is
free and it is its client's turn, so that no client waits behind all requests of another.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.core.outbox import Outbox
from nano_inference.server.limits import FairQueue, quota
from nano_inference.server.security import Client
from nano_inference.types import StepStats

Enter = Callable[[int], None]
"""Queues a call's request with this index in the engine."""

LOOKAHEAD = 256
"""Output tokens for which a running sample is assumed to need room in the KV cache."""
_MIN_FREE = 1 / 8
"""Fraction of free KV cache blocks below which the cache counts as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacity of the engine."""

    num_seats: int
    """Samples that can run at once."""
    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens per block."""
    step_tokens: int
    """Maximum tokens of one step."""

    @property
    def num_ahead(self) -> int:
        """Samples that the engine may have beyond its seats, so that a freed seat is filled in the next step."""
        return max(1, self.num_seats // 16)

    @property
    def num_unstarted(self) -> int:
        """Samples that may wait in the engine whatever the length of their prompts, which may be cached."""
        return max(4, self.step_tokens // 64)


class _Usage(NamedTuple):
    """What one request occupies in the engine."""

    num_seats: int
    """Samples that have not ended."""
    num_unstarted: int
    """Those of them that the engine has not started."""
    num_unstarted_tokens: int
    """Tokens that the engine computes before all of them have started; the prompt once."""
    num_tokens: int
    """Tokens of K/V that they have, plus up to `LOOKAHEAD` more per sample."""


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedRequest:
    """One request of a call."""

    outbox: Outbox
    index: int
    client: Client
    enter: Enter

    @property
    def num_samples(self) -> int:
        return self.outbox.requests[self.index].num_samples

    def usage(self) -> _Usage:
        """Return what its samples occupy now."""
        request = self.outbox.requests[self.index]
        most = request.params.max_tokens
        seats = unstarted = 0
        tokens = len(request.prompt)
        for times in self.outbox.times[self.index]:
            if times.ended is None:
                seats += 1
                unstarted += times.started is None
                left = LOOKAHEAD if most is None else max(0, most - times.num_tokens)
                tokens += times.num_tokens + min(LOOKAHEAD, left)
        prompt = len(request.prompt) if unstarted and unstarted == seats else 0
        return _Usage(seats, unstarted, prompt + unstarted, tokens if seats else 0)


class _Occupancy:
    """What the entered requests occupy at one moment, in total and by client."""

    def __init__(self, capacity: Capacity, share: float, entries: Iterable[_QueuedRequest], *, is_full: bool) -> None:
        self._capacity = capacity
        self._share = share
        self._seats: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._num_seats = self._num_tokens = 0
        self._num_unstarted = self._num_unstarted_tokens = 0
        self._is_full = is_full
        for entry in entries:
            self.add(entry)

    def add(self, entry: _QueuedRequest) -> None:
        used = entry.usage()
        self._seats[entry.client.name] += used.num_seats
        self._tokens[entry.client.name] += used.num_tokens
        self._num_seats += used.num_seats
        self._num_tokens += used.num_tokens
        self._num_unstarted += used.num_unstarted
        self._num_unstarted_tokens += used.num_unstarted_tokens

    def has_seat(self) -> bool:
        """Return True if the engine may get another sample: a seat is free, and few of its samples are unstarted."""
        capacity = self._capacity
        if self._num_seats >= capacity.num_seats + capacity.num_ahead:
            return False
        if self._is_full:
            return not self._num_unstarted
        is_short = self._num_unstarted_tokens < 2 * capacity.step_tokens
        return is_short or self._num_unstarted < capacity.num_unstarted

    def fits(self, entry: _QueuedRequest) -> bool:
        """Return True if the entry is within its client's share, or the client has no other."""
        name = entry.client.name
        seats, tokens = self._seats[name], self._tokens[name]
        if entry.client.is_exempt or self._share >= 1 or not seats:
            return True
        capacity = self._capacity
        most_seats = quota(self._share, capacity.num_seats, self._num_seats - seats)
        most_tokens = quota(self._share, capacity.num_blocks * capacity.block_size, self._num_tokens - tokens)
        return seats + entry.num_samples <= most_seats and tokens + entry.usage().num_tokens <= most_tokens


class Dispatcher:
    """Owns the requests that wait for their turn, and tracks those that the engine has."""

    def __init__(self, capacity: Capacity, *, share: float = 1.0) -> None:
        self._capacity = capacity
        self._share = share
        self._queue: FairQueue[_QueuedRequest] = FairQueue()
        self._waiting: dict[Outbox, dict[int, _QueuedRequest]] = {}
        """Open call -> its waiting requests by index."""
        self._entered: dict[Outbox, list[_QueuedRequest]] = {}
        """Open call -> its requests that the engine has."""
        self._num_waiting = 0
        self._is_full = False
        """True if the KV cache was full after the latest step."""
        self._occupancy: _Occupancy | None = None
        """None if it has to be counted again."""

    @property
    def num_waiting(self) -> int:
        """Samples that wait for their turn."""
        return self._num_waiting

    def add(self, outbox: Outbox, client: Client, enter: Enter) -> None:
        """Queue a call's requests; each is passed to `enter` when it is its turn."""
        self._entered[outbox] = []
        self._waiting[outbox] = {}
        for index in range(len(outbox.requests)):
            entry = _QueuedRequest(outbox, index, client, enter)
            self._waiting[outbox][index] = entry
            self._queue.push(client.name, entry.num_samples, entry)
            self._num_waiting += entry.num_samples
        self._dispatch()

    def remove(self, outbox: Outbox) -> None:
        """Forget a call that is closed."""
        for entry in self._waiting.pop(outbox).values():
            self._queue.remove(entry.client.name, entry)
            self._num_waiting -= entry.num_samples
        if self._entered.pop(outbox):
            self._occupancy = None  # its requests in the engine end in the next step

    def enter_all(self, outbox: Outbox) -> None:
        """Pass all requests of a call to the engine, which is about to end them."""
        self._occupancy = None
        for entry in tuple(self._waiting.get(outbox, {}).values()):
            self._queue.remove(entry.client.name, entry)
            self._enter(entry)

    def after_step(self, stats: StepStats) -> StepStats:
        """Dispatch requests after a step; return its counts with the samples that wait here counted as waiting."""
        self._is_full = stats.num_free_blocks < self._capacity.num_blocks * _MIN_FREE
        self._occupancy = None
        counted = replace(stats, num_waiting=stats.num_waiting + self._num_waiting)
        self._dispatch()
        return counted

    def _dispatch(self) -> None:
        if not self._queue:
            return
        if self._occupancy is None:
            entered = itertools.chain.from_iterable(self._entered.values())
            self._occupancy = _Occupancy(self._capacity, self._share, entered, is_full=self._is_full)
        while self._occupancy.has_seat():
            entry = self._queue.pop(self._occupancy.fits)
            if entry is None:
                return
            self._occupancy.add(entry)
            self._enter(entry)

    def _enter(self, entry: _QueuedRequest) -> None:
        del self._waiting[entry.outbox][entry.index]
        self._entered[entry.outbox].append(entry)
        self._num_waiting -= entry.num_samples
        entry.enter(entry.index)
