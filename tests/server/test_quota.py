"""Quotas, fair queueing and dispatching, without an engine."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from nano_inference.core.outbox import Outbox
from nano_inference.server.dispatch import Capacity, Dispatcher
from nano_inference.server.limits import MAX_TAGS, FairQueue, quota
from nano_inference.server.security import Client
from nano_inference.types import EngineRequest, SamplingParams, StepStats

GREEDY, OTHER, THIRD = Client("key 0"), Client("key 1"), Client("key 2")
CAPACITY = Capacity(num_seats=16, num_blocks=1000, block_size=16, step_tokens=256)


@pytest.mark.parametrize("num_clients", [1, 2, 3, 10])
def test_quota_leaves_capacity_free_for_any_number_of_clients(num_clients: int) -> None:
    held = [0] * num_clients
    while True:
        grown = [count + (count < quota(0.75, 1000, sum(held) - count)) * (sum(held) < 1000) for count in held]
        for index, count in enumerate(grown):
            held[index] += (count > held[index]) and held[index] < quota(0.75, 1000, sum(held) - held[index])
        if all(count >= quota(0.75, 1000, sum(held) - count) for count in held):
            break
    expected = 1000 * 0.75 / (1 + (num_clients - 1) * 0.75)
    assert max(held) - min(held) <= 2 and abs(held[0] - expected) <= 2
    assert sum(held) < 1000


def served(queue: FairQueue[str], count: int) -> str:
    items = [queue.pop(lambda _: True) for _ in range(count)]
    return "".join(item[0] for item in items if item is not None)


def test_clients_are_served_in_turns_and_each_in_its_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push("a", 1, f"a{number}")
    for number in range(2):
        queue.push("b", 1, f"b{number}")
    assert served(queue, 6) == "ababaa"
    assert queue.pop(lambda _: True) is None and not queue


@pytest.mark.parametrize("seed", range(20))
def test_service_of_two_waiting_clients_differs_by_one_cost(seed: int) -> None:
    chance = random.Random(seed)
    queue: FairQueue[tuple[str, int]] = FairQueue()
    pending: Counter[str] = Counter()
    got: Counter[str] = Counter()
    number = 0
    for client in "ab":
        for _ in range(5):
            queue.push(client, 1, (client, number := number + 1))
            pending[client] += 1
    for _ in range(500):
        item = queue.pop(lambda _: True)
        assert item is not None
        got[item[0]] += 1
        assert abs(got["a"] - got["b"]) <= 1
        queue.push(item[0], 1, (item[0], number := number + 1))
        for _ in range(chance.randrange(2)):
            queue.push("a", 1, ("a", number := number + 1))


@pytest.mark.parametrize(("num_others", "next_item"), [(MAX_TAGS - 1, "fresh"), (MAX_TAGS, "again")])
def test_service_of_a_client_is_forgotten_after_that_of_many_others(num_others: int, next_item: str) -> None:
    """Otherwise clients that change their address would fill the memory."""
    queue: FairQueue[str] = FairQueue()
    queue.push("always there", 1, "waiting")
    for client, cost in (("heavy", 10**6), *((f"address {number}", 1) for number in range(num_others))):
        queue.push(client, cost, client)
        assert queue.pop(lambda item: item != "waiting") == client
    queue.push("heavy", 1, "again")
    queue.push("new", 1, "fresh")
    assert queue.pop(lambda item: item != "waiting") == next_item


class World:
    """A dispatcher, and the requests that it passed to an engine that starts them at once."""

    def __init__(self, share: float = 0.75, capacity: Capacity = CAPACITY) -> None:
        self.dispatcher = Dispatcher(capacity, share=share)
        self.capacity = capacity
        self.entered: list[tuple[Outbox, int]] = []

    def request(self, client: Client, *sizes: int, prompt: int = 10, max_tokens: int = 100) -> Outbox:
        """Open a call; `sizes`: samples of each prompt."""
        params = SamplingParams(max_tokens=max_tokens)
        outbox = Outbox(
            [EngineRequest(prompt=(1,) * prompt, params=params, num_samples=size) for size in sizes or (1,)]
        )
        self.dispatcher.add(outbox, client, lambda index: self.entered.append((outbox, index)))
        return outbox

    def leave(self, outbox: Outbox) -> None:
        """Close a call."""
        self.dispatcher.remove(outbox)

    def step(self, num_free_blocks: int | None = None, *, starts: bool = True) -> StepStats:
        """Run a step in which all entered samples start."""
        if starts:
            for outbox, index in self.entered:
                for clock in outbox.times[index]:
                    clock.started = clock.started or time.monotonic()
        free = self.capacity.num_blocks if num_free_blocks is None else num_free_blocks
        counts = dict.fromkeys(("num_rows", "num_computed", "num_sampled", "num_preempted"), 0)
        stats = StepStats(**counts, num_running=0, num_waiting=0, num_free_blocks=free, weight_version=0)
        return self.dispatcher.after_step(stats)

    def end(self, outbox: Outbox) -> None:
        for row in outbox.times:
            for clock in row:
                clock.ended = time.monotonic()

    def has(self, outbox: Outbox) -> bool:
        """Return True if the engine has all its requests."""
        return len([one for one, _ in self.entered if one is outbox]) == len(outbox.requests)

    def count(self, outboxs: list[Outbox]) -> int:
        """Return how many of the outboxs the engine has."""
        return sum(self.has(outbox) for outbox in outboxs)


def test_client_at_share_leaves_seats_to_another() -> None:
    world = World()
    greedy = [world.request(GREEDY) for _ in range(64)]
    for _ in range(20):
        world.step()
    assert world.count(greedy) == 12
    assert world.has(world.request(OTHER))


def test_freed_seats_alternate_between_clients() -> None:
    world = World(share=1.0)
    greedy = [world.request(GREEDY) for _ in range(64)]
    for _ in range(20):
        world.step()
    others = [world.request(OTHER) for _ in range(8)] + [world.request(THIRD) for _ in range(8)]
    before = world.count(greedy)
    for outbox in greedy[:before]:
        world.end(outbox)
        world.step()
        world.step()
    entered = [outbox for outbox, _ in world.entered[before:]]
    assert sum(outbox in others for outbox in entered[:3]) == 2, "those who came late are not behind 47"
    counts = Counter("greedy" if outbox in greedy else "others" for outbox in entered[:12])
    assert counts == {"greedy": 4, "others": 8}


@pytest.mark.parametrize(
    ("prompt", "step_tokens", "ahead"),
    [(9, 256, 52), (300, 256, 4), (9, 2048, 272), (300, 2048, 32)],  # 2 steps of tokens, or a few long prompts
)
def test_engine_queue_stays_short(prompt: int, step_tokens: int, ahead: int) -> None:
    world = World(share=1.0, capacity=Capacity(num_seats=256, num_blocks=9999, block_size=16, step_tokens=step_tokens))
    outboxs = [world.request(GREEDY, prompt=prompt) for _ in range(600)]
    assert world.count(outboxs) == ahead, "nothing has started yet"
    world.step(starts=False)
    assert world.count(outboxs) == ahead
    world.step()
    assert world.count(outboxs) == min(2 * ahead, 272)
    for _ in range(80):
        world.step()
    assert world.count(outboxs) == 256 + 16
    assert world.step().num_waiting == 600 - 272


def test_cache_share_includes_lookahead_tokens() -> None:
    world = World(capacity=Capacity(num_seats=16, num_blocks=100, block_size=16, step_tokens=256))
    outboxs = [world.request(GREEDY, prompt=44, max_tokens=1000) for _ in range(8)]
    world.step()
    world.step()
    assert world.count(outboxs) == 4, "1200 of 1600 tokens, 300 each"
    assert world.has(world.request(OTHER, prompt=44, max_tokens=1000))
    long = World(capacity=Capacity(num_seats=16, num_blocks=100, block_size=16, step_tokens=256))
    assert long.has(long.request(GREEDY, prompt=1500, max_tokens=90)), "what is more than its share runs alone"


def test_closed_outbox_releases_seats_and_turns() -> None:
    world = World(share=1.0)
    running = [world.request(GREEDY) for _ in range(17)]
    for _ in range(5):
        world.step()
    waiting = [world.request(GREEDY) for _ in range(5)]
    assert world.count(running) == 17 and world.count(waiting) == 0
    assert world.dispatcher.num_waiting == 5
    world.leave(waiting[0])
    assert world.dispatcher.num_waiting == 4
    world.end(running[0])
    world.leave(running[0])
    world.step()
    assert not world.has(waiting[0]) and world.has(waiting[1])
    for outbox in [*running[1:], *waiting[1:]]:
        world.leave(outbox)
    assert world.dispatcher.num_waiting == 0 and world.step().num_waiting == 0
