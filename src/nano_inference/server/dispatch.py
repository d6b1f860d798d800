"""Passes admitted requests to the engine, fairly between clients. Runs on the event loop.

The engine serves its own queue first come, first served. That queue is kept short: a request waits here until a seat is
free and it is its client's turn, so that no client waits behind all requests of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from nano_inference.core.outbox import Outbox
from nano_inference.server.limits import FairQueue, quota
from nano_inference.server.security import Client
from nano_inference.types import StepStats

Enter = Callable[[int], None]
"""Queues the outbox's request with this index in the engine."""

ASSUMED_OUTPUT = 256
"""Output tokens for which a running sample is assumed to need room in the KV cache."""
_MIN_FREE = 1 / 8
"""Fraction of free KV cache blocks below which the cache counts as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    num_seats: int  # samples that can run at once
    num_blocks: int  # blocks of the KV cache
    block_size: int  # tokens per block
    step_tokens: int  # maximum tokens of one step

    @property
    def num_ahead(self) -> int:
        """Samples that the engine may have beyond its seats, so that a freed seat is filled in the next step."""
        return max(1, self.num_seats // 16)

    @property
    def num_unstarted(self) -> int:
        """Samples that may wait in the engine whatever the length of their prompts, which may be cached."""
        return max(4, self.step_tokens // 64)


@dataclass(slots=True)
class _Usage:
    num_seats: int = 0  # samples that have not ended
    num_unstarted: int = 0  # those of them that the engine has not started
    num_unstarted_tokens: int = 0  # tokens that it computes before all of them have started; a prompt once
    num_tokens: int = 0  # tokens of K/V that they have, plus up to `ASSUMED_OUTPUT` more per sample

    def add(self, other: _Usage) -> None:
        self.num_seats += other.num_seats
        self.num_unstarted += other.num_unstarted
        self.num_unstarted_tokens += other.num_unstarted_tokens
        self.num_tokens += other.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    outbox: Outbox
    index: int
    client: Client
    enter: Enter

    @property
    def num_samples(self) -> int:
        return self.outbox.requests[self.index].num_samples

    def usage(self) -> _Usage:
        request = self.outbox.requests[self.index]
        most = request.params.max_tokens
        seats = unstarted = 0
        tokens = len(request.prompt)
        for times in self.outbox.times[self.index]:
            if times.ended is None:
                seats += 1
                unstarted += times.started is None
                left = ASSUMED_OUTPUT if most is None else max(0, most - times.num_tokens)
                tokens += times.num_tokens + min(ASSUMED_OUTPUT, left)
        prompt = len(request.prompt) if unstarted and unstarted == seats else 0
        return _Usage(seats, unstarted, prompt + unstarted, tokens if seats else 0)


class Dispatcher:
    """Owns the requests that wait for their turn, and tracks those that the engine has."""

    def __init__(self, capacity: Capacity, *, share: float = 1.0) -> None:
        self._capacity = capacity
        self._share = share
        self._queue: FairQueue[_Entry] = FairQueue()
        self._waiting: dict[Outbox, dict[int, _Entry]] = {}  # open outbox -> its waiting requests by index
        self._entered: dict[Outbox, list[_Entry]] = {}  # open outbox -> its requests that the engine has
        self._num_waiting = 0
        self._is_full = False  # True if the KV cache was full after the latest step
        self._used: dict[str, _Usage] | None = None  # by client; None if it has to be counted again
        self._total = _Usage()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, outbox: Outbox, client: Client, enter: Enter) -> None:
        """Queue the requests of an outbox; each is passed to `enter` when it is its turn."""
        self._entered[outbox] = []
        self._waiting[outbox] = {}
        for index in range(len(outbox.requests)):
            entry = _Entry(outbox, index, client, enter)
            self._waiting[outbox][index] = entry
            self._queue.push(client.name, entry.num_samples, entry)
            self._num_waiting += entry.num_samples
        self._dispatch()

    def remove(self, outbox: Outbox) -> None:
        for entry in self._waiting.pop(outbox).values():
            self._queue.remove(entry.client.name, entry)
            self._num_waiting -= entry.num_samples
        if self._entered.pop(outbox):
            self._used = None  # its requests in the engine end in the next step

    def enter_all(self, outbox: Outbox) -> None:
        """Pass all requests of an outbox to the engine, which is about to end them."""
        self._used = None
        for entry in tuple(self._waiting.get(outbox, {}).values()):
            self._queue.remove(entry.client.name, entry)
            self._enter(entry)

    def after_step(self, stats: StepStats) -> StepStats:
        """Dispatch requests after a step; return its counts with the samples that wait here counted as waiting."""
        self._is_full = stats.num_free_blocks < self._capacity.num_blocks * _MIN_FREE
        self._used = None
        counted = replace(stats, num_waiting=stats.num_waiting + self._num_waiting)
        self._dispatch()
        return counted

    def _dispatch(self) -> None:
        if not self._queue:
            return
        if self._used is None:
            self._used, self._total = {}, _Usage()
            for entered in chain.from_iterable(self._entered.values()):
                self._count(self._used, entered)
        used = self._used
        while self._has_seat():
            entry = self._queue.pop(partial(self._fits, used))
            if entry is None:
                return
            self._count(used, entry)
            self._enter(entry)

    def _count(self, used: dict[str, _Usage], entry: _Entry) -> None:
        usage, name = entry.usage(), entry.client.name
        if (own := used.get(name)) is None:
            own = used[name] = _Usage()
        own.add(usage)
        self._total.add(usage)

    def _has_seat(self) -> bool:
        capacity, total = self._capacity, self._total
        if total.num_seats >= capacity.num_seats + capacity.num_ahead:
            return False
        if self._is_full:
            return not total.num_unstarted
        is_short = total.num_unstarted_tokens < 2 * capacity.step_tokens
        return is_short or total.num_unstarted < capacity.num_unstarted

    def _fits(self, used: Mapping[str, _Usage], entry: _Entry) -> bool:
        """Return True if the entry is within its client's share, or the client has no other."""
        own, capacity = used.get(entry.client.name, _Usage()), self._capacity
        if entry.client.is_exempt or self._share >= 1 or not own.num_seats:
            return True
        most_seats = quota(self._share, capacity.num_seats, self._total.num_seats - own.num_seats)
        num_slots = capacity.num_blocks * capacity.block_size
        most_tokens = quota(self._share, num_slots, self._total.num_tokens - own.num_tokens)
        has_room = own.num_tokens + entry.usage().num_tokens <= most_tokens
        return own.num_seats + entry.num_samples <= most_seats and has_room

    def _enter(self, entry: _Entry) -> None:
        del self._waiting[entry.outbox][entry.index]
        self._entered[entry.outbox].append(entry)
        self._num_waiting -= entry.num_samples
        entry.enter(entry.index)
