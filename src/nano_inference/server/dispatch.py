"""Gives admitted requests to the engine, in turns between clients. All of it runs on the event loop.

The engine serves its own queue first come, first served. It is kept short: a request waits here until a seat is free
and its client's turn has come, so that no client waits behind all requests of another.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.server.clients import Client
from nano_inference.server.quota import FairQueue, quota
from nano_inference.server.ticket import Ticket
from nano_inference.types import StepStats

Enter = Callable[[Ticket, tuple[int, ...]], None]
"""Queues some of a ticket's asks in the engine."""
Enqueue = Callable[[Ticket, Enter], None]
"""Takes a ticket that was opened, and enters its asks when their turn comes."""

LOOKAHEAD = 256
"""Tokens that a running sample is expected to add, when room in the KV cache is shared out."""
_FULL = 1 / 8
"""Part of the KV cache below which free room counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the engine has."""

    num_seats: int
    """Samples that run at once."""
    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens of a block."""
    step_tokens: int
    """Most tokens of one step."""

    @property
    def num_ahead(self) -> int:
        """Samples that the engine may have beyond its seats: a seat must not be empty for a step."""
        return max(1, self.num_seats // 16)

    @property
    def num_unstarted(self) -> int:
        """Samples that may wait in the engine however long their prompts are, most of which may be cached."""
        return max(4, self.step_tokens // 64)


class _Held(NamedTuple):
    """What an ask takes of the engine."""

    num_seats: int
    """Samples that have not ended."""
    num_unstarted: int
    """Those of them that the engine has not begun to compute."""
    num_unstarted_tokens: int
    """Tokens that the engine computes before all of them have begun; the prompt once."""
    num_tokens: int
    """Tokens of K/V that they have, and are expected to add soon."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One ask of a ticket."""

    ticket: Ticket
    index: int
    client: Client
    enter: Enter

    @property
    def num_samples(self) -> int:
        return self.ticket.requests[self.index].num_samples

    def held(self) -> _Held:
        """Return what its samples hold now."""
        request = self.ticket.requests[self.index]
        most = request.params.max_tokens
        seats = unstarted = 0
        tokens = len(request.prompt)
        for clock in self.ticket.times[self.index]:
            if clock.ended is None:
                seats += 1
                unstarted += clock.started is None
                left = LOOKAHEAD if most is None else max(0, most - clock.num_tokens)
                tokens += clock.num_tokens + min(LOOKAHEAD, left)
        prompt = len(request.prompt) if unstarted and unstarted == seats else 0
        return _Held(seats, unstarted, prompt + unstarted, tokens if seats else 0)


class _Room:
    """What is free at one moment, and what each client holds of the rest."""

    def __init__(self, capacity: Capacity, share: float, entries: Iterable[_Entry], *, is_full: bool) -> None:
        self._capacity = capacity
        self._share = share
        self._seats: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._num_seats = self._num_tokens = 0
        self._num_unstarted = self._num_unstarted_tokens = 0
        self._is_full = is_full
        for entry in entries:
            self.take(entry)

    def take(self, entry: _Entry) -> None:
        """Count what an entry holds."""
        held = entry.held()
        self._seats[entry.client.name] += held.num_seats
        self._tokens[entry.client.name] += held.num_tokens
        self._num_seats += held.num_seats
        self._num_tokens += held.num_tokens
        self._num_unstarted += held.num_unstarted
        self._num_unstarted_tokens += held.num_unstarted_tokens

    def has_seat(self) -> bool:
        """Return whether the engine may get anything more: it has a seat, and no more to begin than it soon will."""
        capacity = self._capacity
        if self._num_seats >= capacity.num_seats + capacity.num_ahead:
            return False
        if self._is_full:
            return not self._num_unstarted
        is_short = self._num_unstarted_tokens < 2 * capacity.step_tokens
        return is_short or self._num_unstarted < capacity.num_unstarted

    def fits(self, entry: _Entry) -> bool:
        """Return whether an entry stays within its client's share; what a client without any asks for does."""
        name = entry.client.name
        seats, tokens = self._seats[name], self._tokens[name]
        if entry.client.is_exempt or self._share >= 1 or not seats:
            return True
        capacity = self._capacity
        most_seats = quota(self._share, capacity.num_seats, self._num_seats - seats)
        most_tokens = quota(self._share, capacity.num_blocks * capacity.block_size, self._num_tokens - tokens)
        return seats + entry.num_samples <= most_seats and tokens + entry.held().num_tokens <= most_tokens


class Dispatcher:
    """Owns the requests that wait for their turn, and knows which ones the engine has."""

    def __init__(self, capacity: Capacity, *, share: float = 1.0) -> None:
        self._capacity = capacity
        self._share = share
        self._queue: FairQueue[_Entry] = FairQueue()
        self._waiting: dict[Ticket, dict[int, _Entry]] = {}
        """What waits here of every open ticket."""
        self._entered: dict[Ticket, list[_Entry]] = {}
        """What the engine has of every open ticket."""
        self._num_waiting = 0
        self._is_full = False
        """Whether the KV cache had no room after the latest step."""
        self._room: _Room | None = None
        """What is free; None when that has to be counted anew."""

    @property
    def num_waiting(self) -> int:
        """Samples that wait for their turn."""
        return self._num_waiting

    @contextmanager
    def queue_for(self, client: Client) -> Iterator[Enqueue]:
        """Yield what enters a ticket's asks in this client's turns; leaving the block forgets the ticket."""
        tickets: list[Ticket] = []

        def gate(ticket: Ticket, enter: Enter) -> None:
            tickets.append(ticket)
            self._add(ticket, client, enter)

        try:
            yield gate
        finally:
            for ticket in tickets:
                for entry in self._waiting.pop(ticket).values():
                    self._queue.remove(client.name, entry)
                    self._num_waiting -= entry.num_samples
                if self._entered.pop(ticket):
                    self._room = None  # used after the next step, which ends what the engine has of it

    def after_step(self, stats: StepStats) -> StepStats:
        """Take the counts of a step, and use the room that it left; return them with what waits here as waiting."""
        self._is_full = stats.num_free_blocks < self._capacity.num_blocks * _FULL
        self._room = None
        counted = replace(stats, num_waiting=stats.num_waiting + self._num_waiting)
        self._dispatch()
        return counted

    def _add(self, ticket: Ticket, client: Client, enter: Enter) -> None:
        self._entered[ticket] = []
        self._waiting[ticket] = {}
        for index in range(len(ticket.requests)):
            entry = _Entry(ticket, index, client, enter)
            self._waiting[ticket][index] = entry
            self._queue.push(client.name, entry.num_samples, entry)
            self._num_waiting += entry.num_samples
        ticket.dispatch_now = lambda: self._enter_all(ticket)
        self._dispatch()

    def _enter_all(self, ticket: Ticket) -> None:
        """Enter what is left of a ticket ahead of other clients: it is about to be ended."""
        self._room = None
        for entry in tuple(self._waiting[ticket].values()):
            self._queue.remove(entry.client.name, entry)
            self._enter(entry)

    def _dispatch(self) -> None:
        """Enter what may run now."""
        if not self._queue:
            return
        if self._room is None:
            entered = itertools.chain.from_iterable(self._entered.values())
            self._room = _Room(self._capacity, self._share, entered, is_full=self._is_full)
        while self._room.has_seat():
            entry = self._queue.pop(self._room.fits)
            if entry is None:
                return
            self._room.take(entry)
            self._enter(entry)

    def _enter(self, entry: _Entry) -> None:
        del self._waiting[entry.ticket][entry.index]
        self._entered[entry.ticket].append(entry)
        self._num_waiting -= entry.num_samples
        entry.enter(entry.ticket, (entry.index,))
