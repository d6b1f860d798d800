"""Limits of what is admitted, one client's share of them, and a fair queue over clients."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nano_inference.server.errors import ApiError, queue_full, quota_exceeded
from nano_inference.server.generation import Generation
from nano_inference.server.security import Client

Item = TypeVar("Item")

MAX_TAGS = 1024  # clients whose finish tags are kept; beyond it, the least recently served is dropped


def quota(share: float, capacity: int, num_others: int) -> int:
    """Return the most units of `capacity` that one client may hold while all others together hold `num_others`.

    The dynamic threshold of A. K. Choudhury and E. L. Hahne (IEEE/ACM Transactions on Networking, 1998) with
    alpha = share / (1 - share): a client may hold alpha units per free unit. If k clients hold all they may, each has
    share / (1 + (k - 1) * share) of the capacity, so that some is free for any k.
    """
    return max(1, int(share * (capacity - num_others)))


class QueueLimits:
    """Owns the counts of admitted samples and tokens. A generation is admitted as a whole or refused."""

    def __init__(self, *, max_samples: int, max_tokens: int, share: float = 1.0) -> None:
        self.max_samples = max_samples  # limit of running and waiting samples
        self.max_tokens = max_tokens  # limit of their prompt and output tokens
        self.share = share  # fraction of the capacity not held by others that one client may hold; 1: no quota
        self.num_samples = 0
        self.num_tokens = 0
        self._samples: Counter[str] = Counter()  # client -> samples, if any
        self._tokens: Counter[str] = Counter()

    @property
    def num_clients(self) -> int:
        return len(self._samples)

    @property
    def largest_part(self) -> int:
        return max(self._samples.values(), default=0)

    @contextmanager
    def reserve(self, generation: Generation, client: Client) -> Iterator[None]:
        """Count a generation as admitted until the block is left.

        Raises `ApiError`: 400 for one that exceeds the limits by itself, 503 with Retry-After if the queue is full,
        429 with Retry-After above the client's quota.
        """
        self._refuse(generation, client.name, 1.0 if client.is_exempt else self.share)
        self._take(client.name, generation.total_samples, generation.num_tokens)
        try:
            yield
        finally:
            self._take(client.name, -generation.total_samples, -generation.num_tokens)

    def _take(self, name: str, num_samples: int, num_tokens: int) -> None:
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        for held, change in ((self._samples, num_samples), (self._tokens, num_tokens)):
            held[name] += change
            if not held[name]:
                del held[name]

    def _refuse(self, generation: Generation, name: str, share: float) -> None:
        """Raise `ApiError` for a generation that cannot be admitted, now or ever."""
        samples = f"the request has {generation.total_samples} samples"
        tokens = f"its prompts and outputs can reach {generation.num_tokens} tokens"
        for asked, capacity, what, param in (
            (generation.total_samples, self.max_samples, samples, "n"),
            (generation.num_tokens, self.max_tokens, tokens, "max_tokens"),
        ):
            if asked > capacity:
                raise ApiError(400, f"{what}; this server accepts {capacity} at once", param=param)
            if asked > (most := quota(share, capacity, 0)):
                text = f"{what}; this server accepts {most} of one client at once (--client-share)"
                raise ApiError(400, text, param=param)
        if self.num_samples + generation.total_samples > self.max_samples:
            raise queue_full(
                f"the queue is full: {self.num_samples} of {self.max_samples} samples are open, the request has "
                f"{generation.total_samples}; try again shortly"
            )
        if self.num_tokens + generation.num_tokens > self.max_tokens:
            raise queue_full(
                f"the queue is full: open requests can reach {self.num_tokens} of {self.max_tokens} tokens, "
                f"the request {generation.num_tokens}; try again shortly",
                code="too_many_tokens",
            )
        for held, asked, used, capacity, unit in (
            (self._samples[name], generation.total_samples, self.num_samples, self.max_samples, "samples"),
            (self._tokens[name], generation.num_tokens, self.num_tokens, self.max_tokens, "tokens"),
        ):
            most = quota(share, capacity, used - held)
            if held + asked <= most:
                continue
            text = (
                f"{name.partition(' ')[0]} quota: this client's open requests hold {held} {unit}, the request has "
                f"{asked}; one client may hold {most} of {capacity} now (--client-share {self.share:g} of what others "
                "leave); try again when some have ended"
            )
            # A client that holds nothing is refused because of the other clients: 503, not 429.
            raise quota_exceeded(text) if held else queue_full(text)


@dataclass(slots=True)
class _ClientQueue(Generic[Item]):
    start: float  # start tag of the oldest item
    items: OrderedDict[Item, int] = field(default_factory=OrderedDict)  # item -> cost, oldest first; removal is O(1)


class FairQueue(Generic[Item]):
    """A queue that is first come, first served within a client, and fair between clients.

    Start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, SIGCOMM 1996) with equal weights: an item's start tag is
    the larger of the virtual time and its predecessor's finish tag, its finish tag is that plus its cost, and the
    smallest start tag is served first. While two clients wait, their service differs by at most one item's cost.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _ClientQueue[Item]] = {}
        self._finish: OrderedDict[str, float] = OrderedDict()  # of clients served since the queue was last empty
        self._now = 0.0  # virtual time: the start tag of the item served last
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, client: str, cost: int, item: Item) -> None:
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
                # A client whose item could not run is behind virtual time; it gets no compensation.
                self._now = max(self._now, queue.start)
                queue.start = self._finish[client] = self._now + queue.items[item]
                self._finish.move_to_end(client)
                self.remove(client, item)
                return item
        return None

    def remove(self, client: str, item: Item) -> None:
        """Remove an item without charging its cost."""
        queue = self._queues[client]
        del queue.items[item]
        self._num_items -= 1
        if not queue.items:
            del self._queues[client]
        if not self._queues:
            self._finish.clear()
            self._now = 0.0
        elif len(self._finish) > MAX_TAGS:
            self._finish.popitem(last=False)
