"""What one client may hold, and in which order clients are served. Pure; no room of the server is imported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_TAGS = 1024
"""Clients that are remembered for what they were served; beyond, the one served longest ago is forgotten first."""


def quota(share: float, capacity: int, num_others: int) -> int:
    """Return the most units of `capacity` that one client may hold while all others together hold `num_others`.

    The dynamic threshold of A. K. Choudhury and E. L. Hahne (IEEE/ACM Transactions on Networking, 1998) with
    alpha = share / (1 - share): a client may hold alpha units for each free one. Of k clients that ask for all they can
    get, each holds share / (1 + (k - 1) * share) of the capacity, so that some is left however many there are.
    """
    return max(1, int(share * (capacity - num_others)))


@dataclass(slots=True)
class _Line(Generic[Item]):
    """What one client waits for."""

    start: float
    """The tag by which the oldest item is compared with those of others."""
    items: OrderedDict[Item, int] = field(default_factory=OrderedDict)
    """Items and their costs, oldest first; one that is in the middle can be removed at once."""


class FairQueue(Generic[Item]):
    """Items that wait, of many clients: first come, first served for one client, in turns between clients.

    Start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, SIGCOMM 1996) with equal weights: an item's start tag is
    the larger of the virtual time and its predecessor's finish tag, its finish tag is that plus its cost, and the
    smallest start tag is served first. While two clients wait, what they are served differs by one item's cost at most.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}
        self._finish: OrderedDict[str, float] = OrderedDict()
        """Finish tags of clients that were served since the queue was last empty."""
        self._now = 0.0
        """Virtual time: the start tag of the item served last."""
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, client: str, cost: int, item: Item) -> None:
        """Add an item, which is not in the queue yet, behind those of the same client."""
        assert cost > 0, "an item without a cost would be served before all others"
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(max(self._now, self._finish.get(client, 0.0)))
        line.items[item] = cost
        self._num_items += 1

    def pop(self, may_run: Callable[[Item], bool]) -> Item | None:
        """Remove and return the next item that may run; None when there is none.

        Only the oldest item of each client is considered: one that may not run keeps its place.
        """
        for client, line in sorted(self._lines.items(), key=lambda pair: pair[1].start):
            item = next(iter(line.items))
            if may_run(item):
                self._serve(client, line)
                return item
        return None

    def remove(self, client: str, item: Item) -> None:
        """Remove an item that is not wanted any more, without a charge."""
        line = self._lines[client]
        del line.items[item]
        self._num_items -= 1
        if not line.items:
            del self._lines[client]
            self._forget()

    def _serve(self, client: str, line: _Line[Item]) -> None:
        # A client that might not run is behind virtual time; turns it could not take are not owed to it.
        self._now = max(self._now, line.start)
        _, cost = line.items.popitem(last=False)
        line.start = self._finish[client] = self._now + cost
        self._finish.move_to_end(client)
        self._num_items -= 1
        if not line.items:
            del self._lines[client]
        self._forget()

    def _forget(self) -> None:
        """Drop the tags that make no difference when no client waits, and the oldest when there are too many."""
        if not self._lines:
            self._finish.clear()
            self._now = 0.0
        elif len(self._finish) > MAX_TAGS:
            self._finish.popitem(last=False)
