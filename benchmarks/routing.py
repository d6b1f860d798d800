"""Simulate the routing of requests to replicas: prefix cache hits and the spread of load. No model, no network.

    python benchmarks/routing.py [--replicas 16,256,1024] [--requests 20] [--seed 0]

Compares the pool's router (`rl/pool/routing.py`) with random choice and round robin on four kinds of work: groups of 8
equal prompts (GRPO), sessions of six turns that each extend the last, prompts after one of a few system prompts, and
prompts with nothing in common. `--requests` is their number for each replica.

The clock of the simulation counts tokens: a replica computes one a tick, prompt tokens that it has not cached and 200
generated ones for each request, in order of arrival; requests arrive so that replicas are busy for 70 % of the time
without a cache. A replica remembers the blocks of 16 tokens of its latest 2,000 blocks. Printed for each router: the
share of prompt tokens that were cached, the work of the busiest replica over the average (computed tokens), and the
mean and the 99th percentile of the ticks until a request's first token. "µs" is the average processor time of one
placement by the router. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from nano_inference.rl.pool.routing import PrefixRouter

BLOCK, CACHED_BLOCKS, NEW_TOKENS, BUSY = 16, 2000, 200, 0.7
VOCAB = 100_000


class BlindRouter:
    """Takes the workers in the order of an iterator, whatever the tokens are."""

    def __init__(self, workers: Iterator[int]) -> None:
        self._workers = workers

    def place(self, tokens: list[int], cost: int, session: str | None = None) -> int:
        """Return the next worker."""
        return next(self._workers)

    def finish(self, worker: int, cost: int) -> None:
        """Do nothing."""


Router = PrefixRouter | BlindRouter


class Replica:
    """Owns the cached blocks of one replica, and the tick until which it is busy."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.num_computed = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, tokens: list[int]) -> int:
        """Return how many first tokens are cached, and remember all whole blocks."""
        found, chain, is_known = 0, 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            is_known = is_known and chain in self._blocks
            found += BLOCK if is_known else 0
            self._blocks[chain] = None
            self._blocks.move_to_end(chain)
        while len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return min(found, len(tokens) - 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and the session to which it belongs."""

    tokens: list[int]
    session: str | None = None


def text(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(size)]


def groups(rng: random.Random, count: int) -> Iterator[Request]:
    """Yield groups of 8 equal prompts of 300 to 700 tokens."""
    for _ in range(count // 8):
        prompt = text(rng, rng.randrange(300, 700))
        yield from (Request(prompt) for _ in range(8))


def sessions(rng: random.Random, count: int) -> Iterator[Request]:
    """Yield the turns of sessions, each with 200 tokens more; half of the sessions are open at the same time."""
    num_sessions = max(1, count // 6)
    history = {index: text(rng, 300) for index in range(num_sessions)}
    left = [index for index in range(num_sessions) for _ in range(6)]
    half = len(left) // 2
    for part in (left[:half], left[half:]):
        rng.shuffle(part)
        for index in part:
            history[index] = history[index] + text(rng, 200)
            yield Request(history[index], f"session-{index}")


def systems(rng: random.Random, count: int) -> Iterator[Request]:
    """Yield prompts of 100 tokens after one of 20 system prompts of 1,000, the first of which are more frequent."""
    known = [text(rng, 1000) for _ in range(20)]
    weights = [1 / (index + 1) for index in range(20)]
    for _ in range(count):
        yield Request([*rng.choices(known, weights)[0], *text(rng, 100)])


def singles(rng: random.Random, count: int) -> Iterator[Request]:
    """Yield prompts of 300 to 700 tokens with nothing in common."""
    yield from (Request(text(rng, rng.randrange(300, 700))) for _ in range(count))


WORK: dict[str, Callable[[random.Random, int], Iterator[Request]]] = {
    "groups": groups,
    "sessions": sessions,
    "system prompts": systems,
    "nothing shared": singles,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one simulation."""

    hits: float
    """Share of prompt tokens that were cached."""
    spread: float
    """Computed tokens of the busiest replica, over the average."""
    mean_wait: float
    worst_wait: float
    """Ticks until the first token: mean and 99th percentile."""
    placement_us: float
    """Average processor time of one placement."""


def simulate(router: Router, requests: Iterator[Request], num_replicas: int, rng: random.Random) -> Outcome:
    """Send requests to replicas as they arrive; the router learns when one has ended."""
    replicas = [Replica() for _ in range(num_replicas)]
    running: list[tuple[float, int, int]] = []
    now, num_prompt, num_hits, placing_s = 0.0, 0, 0, 0.0
    waits: list[float] = []
    for request in requests:
        size = len(request.tokens)
        now += rng.expovariate(BUSY * num_replicas / (size + NEW_TOKENS))
        while running and running[0][0] <= now:
            _, worker, cost = heapq.heappop(running)
            router.finish(worker, cost)
        started = time.thread_time()
        worker = router.place(request.tokens, size + NEW_TOKENS, request.session)
        placing_s += time.thread_time() - started
        replica = replicas[worker]
        hit = replica.cached(request.tokens)
        start = max(now, replica.busy_until)
        first_token = start + size - hit
        replica.busy_until = first_token + NEW_TOKENS
        replica.num_computed += size - hit + NEW_TOKENS
        heapq.heappush(running, (replica.busy_until, worker, size + NEW_TOKENS))
        waits.append(first_token - now)
        num_prompt, num_hits = num_prompt + size, num_hits + hit
    waits.sort()
    work = [replica.num_computed for replica in replicas]
    return Outcome(
        hits=num_hits / num_prompt,
        spread=max(work) / statistics.mean(work),
        mean_wait=statistics.mean(waits),
        worst_wait=waits[int(0.99 * len(waits))],
        placement_us=1e6 * placing_s / len(waits),
    )


def routers(num_replicas: int, seed: int) -> dict[str, Router]:
    """Return a new router of each kind."""
    rng = random.Random(seed)
    drawn = (rng.randrange(num_replicas) for _ in itertools.repeat(None))
    in_turn = itertools.cycle(range(num_replicas))
    return {"prefix": PrefixRouter(num_replicas), "random": BlindRouter(drawn), "round robin": BlindRouter(in_turn)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="16,256,1024")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in map(int, given.replicas.split(",")):
        print(f"{size} replicas".ljust(30), f"{'cached':>8}{'spread':>8}{'mean wait':>11}{'99 %':>9}{'µs':>7}")
        for name, make in WORK.items():
            for kind, router in routers(size, given.seed).items():
                requests = make(random.Random(given.seed), given.requests * size)
                one = simulate(router, requests, size, random.Random(given.seed + 1))
                figures = f"{one.hits:>8.1%}{one.spread:>8.2f}{one.mean_wait:>11.0f}{one.worst_wait:>9.0f}"
                print(f"{name}, {kind}".ljust(30), f"{figures}{one.placement_us:>7.1f}", flush=True)
                found.setdefault(f"{size} {name}", {})[kind] = asdict(one)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
