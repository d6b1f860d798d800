"""Simulate how requests are spread over many replicas: prompt tokens found in a cache, and balance of the work.

    python benchmarks/routing.py [--replicas 10 100 1000 10000] [--requests 10] [--seed 0]

Each replica has an LRU cache of prefix blocks. Requests arrive one by one at a rate that keeps the replicas busy, and a
request's work leaves its replica when as much later work has arrived as the fleet does in the request's time. `hits` is
the share of prompt tokens that the replica had cached, `most` that of one endless cache for all; `spread` is the
largest unfinished work of a replica divided by the mean, as the mean over time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from nano_inference.pool.routing import PrefixRouter

BLOCK = 16
"""Tokens of a cache block."""
CACHE_BLOCKS = 1024
"""Blocks that each replica's cache holds: 16,384 tokens."""
OPEN_PER_REPLICA = 2
"""Requests that each replica works on at the same time, on average."""
MEASURES = 50
"""Times at which the spread is measured."""


class Arrival(NamedTuple):
    """A request. `blocks` names its prompt's blocks: equal prefixes have equal names."""

    blocks: tuple[int, ...]
    output: int
    session: str | None = None


class Router(Protocol):
    """A policy."""

    def place(self, tokens: Sequence[int], cost: int, session: str | None = None) -> int: ...

    def finish(self, worker: int, cost: int) -> None: ...


class RandomRouter:
    """Any replica."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self._size, self._rng = size, rng

    def place(self, tokens: Sequence[int], cost: int, session: str | None = None) -> int:
        return self._rng.randrange(self._size)

    def finish(self, worker: int, cost: int) -> None:
        pass


class RoundRobin:
    """One replica after the other."""

    def __init__(self, size: int) -> None:
        self._size, self._next = size, -1

    def place(self, tokens: Sequence[int], cost: int, session: str | None = None) -> int:
        self._next = (self._next + 1) % self._size
        return self._next

    def finish(self, worker: int, cost: int) -> None:
        pass


class Caches:
    """The blocks that each replica has cached, the least recently used first."""

    def __init__(self, size: int, limit: int | None = CACHE_BLOCKS) -> None:
        self._limit = limit
        self._blocks: list[OrderedDict[tuple[int, int], None]] = [OrderedDict() for _ in range(size)]

    def hit(self, worker: int, blocks: Sequence[int]) -> int:
        """Return how many leading blocks a replica has; then it has all of them."""
        cache, num_hit, is_prefix, chain = self._blocks[worker], 0, True, 0
        for depth, block in enumerate(blocks):
            chain = hash((chain, block))
            key = (depth, chain)
            is_prefix = is_prefix and key in cache
            num_hit += is_prefix
            cache[key] = None
            cache.move_to_end(key)
        while self._limit is not None and len(cache) > self._limit:
            cache.popitem(last=False)
        return num_hit


def new_blocks(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.getrandbits(60) for _ in range(count))


def grpo_groups(rng: random.Random, size: int) -> Iterator[Arrival]:
    """Eight samples of one prompt, as eight requests."""
    while True:
        prompt = new_blocks(rng, rng.randint(8, 32))
        for _ in range(8):
            yield Arrival(prompt, rng.randint(64, 512))


def sessions(rng: random.Random, size: int) -> Iterator[Arrival]:
    """Conversations of eight turns, as many at a time as the fleet works on, each with its name."""
    count = OPEN_PER_REPLICA * size
    open_ones = [(new_blocks(rng, 8), rng.getrandbits(60), index % 8) for index in range(count)]
    order = itertools.chain.from_iterable(rng.sample(range(count), count) for _ in itertools.count())
    for index in order:
        blocks, name, turn = open_ones[index]
        yield Arrival(blocks, 128, f"{name}")
        later = (blocks + new_blocks(rng, 10), name, turn + 1)  # the answer and the next question
        open_ones[index] = later if turn < 7 else (new_blocks(rng, 8), rng.getrandbits(60), 0)


def system_prompts(rng: random.Random, size: int) -> Iterator[Arrival]:
    """One of 64 system prompts of 512 tokens, some much more popular, and a question of 64 tokens."""
    systems = [new_blocks(rng, 32) for _ in range(64)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    while True:
        (system,) = rng.choices(systems, weights)
        yield Arrival(system + new_blocks(rng, 4), rng.randint(32, 256))


def uniform(rng: random.Random, size: int) -> Iterator[Arrival]:
    """Prompts that share nothing."""
    while True:
        yield Arrival(new_blocks(rng, rng.randint(4, 32)), rng.randint(32, 512))


WORKLOADS: dict[str, Callable[[random.Random, int], Iterator[Arrival]]] = {
    "GRPO groups": grpo_groups,
    "sessions": sessions,
    "system prompts": system_prompts,
    "uniform": uniform,
}


class Result(NamedTuple):
    """What a simulation measured."""

    most: float
    hits: float
    spread: float


def simulate(router: Router, arrivals: Iterator[Arrival], size: int, num_requests: int) -> Result:
    """Route `num_requests` requests to `size` replicas."""
    caches, endless, loads = Caches(size), Caches(1, None), [0] * size
    running: list[tuple[float, int, int]] = []
    """(time of its end, replica, cost), by time."""
    clock, num_hit, num_known, num_blocks = 0.0, 0, 0, 0
    spreads: list[float] = []
    warm = num_requests // 4
    every = max(1, (num_requests - warm) // MEASURES)
    for number in range(num_requests):
        arrival = next(arrivals)
        cost = len(arrival.blocks) * BLOCK + arrival.output
        while running and running[0][0] <= clock:
            _, worker, done = heapq.heappop(running)
            loads[worker] -= done
            router.finish(worker, done)
        worker = router.place(arrival.blocks, cost, arrival.session)
        loads[worker] += cost
        found, known = caches.hit(worker, arrival.blocks), endless.hit(0, arrival.blocks)
        heapq.heappush(running, (clock + cost, worker, cost))
        clock += cost / (OPEN_PER_REPLICA * size)
        if number >= warm:
            num_hit, num_known, num_blocks = num_hit + found, num_known + known, num_blocks + len(arrival.blocks)
            if number % every == 0:
                spreads.append(max(loads) * size / sum(loads))
    return Result(num_known / num_blocks, num_hit / num_blocks, sum(spreads) / len(spreads))


def policies(size: int, seed: int) -> dict[str, Router]:
    """Return the policies that are compared. They see a block's name as one token, which is 16 times faster."""
    return {
        "prefix": PrefixRouter(size, block_size=1),
        "random": RandomRouter(size, random.Random(seed)),
        "round robin": RoundRobin(size),
    }


def table(sizes: Sequence[int], per_replica: int, seed: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "workload        replicas  requests   most |    prefix     |    random     |  round robin"
    yield "                                          |  hits  spread |  hits  spread |  hits  spread"
    for name, workload in WORKLOADS.items():
        for size in sizes:
            num_requests = max(2000, per_replica * size)
            results = [
                simulate(router, workload(random.Random(seed), size), size, num_requests)
                for router in policies(size, seed).values()
            ]
            columns = " | ".join(f"{result.hits:5.1%}  {result.spread:6.2f}" for result in results)
            yield f"{name:15} {size:8,}  {num_requests:8,}  {results[0].most:5.1%} | {columns}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000, 10000], help="sizes of the fleet")
    parser.add_argument("--requests", type=int, default=10, help="requests for each replica")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for line in table(given.replicas, given.requests, given.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
