"""One client's share of a capacity, and a fair queue over clients. Pure; imports nothing of the server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_TAGS = 1024
"""Clients whose finish tags are kept; beyond it, the least recently served is dropped."""


def quota(share: float, capacity: int, num_others: int) -> int:
    """Return the most units of `capacity` that one client may hold while all others together hold `num_others`.

    The dynamic threshold of A. K. Choudhury and E. L. Hahne (IEEE/ACM Transactions on Networking, 1998) with
    alpha = share / (1 - share): a client may hold alpha units per free unit. If k clients hold all they may, each has
    share / (1 + (k - 1) * share) of the capacity, so that some is free for any k.
    """
    return max(1, int(share * (capacity - num_others)))


@dataclass(slots=True)
class _ClientQueue(Generic[Item]):
    """Waiting items of one client."""

    start: float
    """Start tag of the oldest item."""
    items: OrderedDict[Item, int] = field(default_factory=OrderedDict)
    """Item -> cost, oldest first; removal is O(1)."""


class FairQueue(Generic[Item]):
    """A queue that is first come, first served within a client, and fair between clients.

    Start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, SIGCOMM 1996) with equal weights: an item's start tag is
    the larger of the virtual time and its predecessor's finish tag, its finish tag is that plus its cost, and the
    smallest start tag is served first. While two clients wait, their service differs by at most one item's cost.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _ClientQueue[Item]] = {}
        self._finish: OrderedDict[str, float] = OrderedDict()
        """Finish tags of the clients served since the queue was last empty."""
        self._now = 0.0
        """Virtual time: the start tag of the item served last."""
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, client: str, cost: int, item: Item) -> None:
        """Append an item that is not in the queue yet to its client's items."""
        assert cost > 0, "an item without a cost would be served before all others"
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = _ClientQueue(max(self._now, self._finish.get(client, 0.0)))
        queue.items[item] = cost
        self._num_items += 1

    def pop(self, may_run: Callable[[Item], bool]) -> Item | None:
        """Remove and return the next item for which `may_run` is true; None if there is none.

        Only the oldest item of each client is considered; one that may not run keeps its position.
        """
        for client, queue in sorted(self._queues.items(), key=lambda pair: pair[1].start):
            item = next(iter(queue.items))
            if may_run(item):
                self._serve(client, queue)
                return item
        return None

    def remove(self, client: str, item: Item) -> None:
        """Remove an item without charging its cost."""
        queue = self._queues[client]
        del queue.items[item]
        self._num_items -= 1
        if not queue.items:
            del self._queues[client]
            self._forget()

    def _serve(self, client: str, queue: _ClientQueue[Item]) -> None:
        # A client whose item could not run is behind virtual time; it gets no compensation.
        self._now = max(self._now, queue.start)
        _, cost = queue.items.popitem(last=False)
        queue.start = self._finish[client] = self._now + cost
        self._finish.move_to_end(client)
        self._num_items -= 1
        if not queue.items:
            del self._queues[client]
        self._forget()

    def _forget(self) -> None:
        """Drop all tags if no client waits, and the oldest one above `MAX_TAGS`."""
        if not self._queues:
            self._finish.clear()
            self._now = 0.0
        elif len(self._finish) > MAX_TAGS:
            self._finish.popitem(last=False)
