"""Fairness of `schedule` under thousands of random arrivals, without a model; time is counted in steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from nano_inference.config import SchedulerConfig
from nano_inference.core.scheduler import OVERTAKERS, SeqView, StepPlan, plan_step, reserve, seats, share

Arrivals = Callable[[int], list[tuple[int, int]]]
"""Maps a step's number to the (prompt tokens, new tokens) of the requests that arrive before it."""


@dataclass
class Life:
    """What happened to one sequence, in steps."""

    num_prompt: int
    num_new: int
    arrived: int
    bound: int
    """Steps in which its first token must come while there are seats and blocks."""
    started: int | None = None
    first: int | None = None
    ended: int | None = None
    num_overtakers: int = 0
    """Younger sequences that were started before it."""


@dataclass
class World:
    """Owns the queues and counts what `schedule` decides; every sequence has blocks of its own."""

    config: SchedulerConfig
    num_blocks: int = 10**9
    free: int = 0
    now: int = 0
    waiting: list[SeqView] = field(default_factory=list)
    running: list[SeqView] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    num_computed: int = 0
    num_lost: int = 0
    """Computed tokens that preemption discarded."""
    num_shared_steps: int = 0

    def __post_init__(self) -> None:
        self.free = self.num_blocks

    def arrive(self, num_prompt: int, num_new: int) -> Life:
        """Put a request at the end of the queue."""
        behind = [v.num_tokens - v.num_computed for v in (*self.running, *self.waiting)]
        steps = sum(-(-count // reserve(self.config)) for count in (*behind, num_prompt) if count > 1) + 1
        life = Life(num_prompt=num_prompt, num_new=num_new, arrived=self.now, bound=steps)
        self.waiting.append(SeqView(len(self.lives), num_prompt, 0, 0, max_new=num_new))
        self.lives.append(life)
        return life

    def step(self) -> StepPlan:
        """Plan a step, check it, and apply it."""
        plan = plan_step(iter(self.waiting), tuple(self.running), self.free, self.config)
        assert plan.work or plan.preempted or not (self.running or self.waiting), "a step without work"
        self.check(plan)
        for id in plan.preempted:
            victim = self.running.pop()
            assert victim.id == id
            self.free += victim.num_blocks
            self.num_lost += victim.num_computed
            self.waiting.insert(0, victim._replace(num_computed=0, num_blocks=0, num_private=0))
        self.now += 1
        for work in plan.work:
            self.apply(work.id, work.num_tokens, work.num_blocks, work.num_sampled)
        self.running.sort(key=lambda v: v.id)
        assert 0 <= self.free <= self.num_blocks
        return plan

    def check(self, plan: StepPlan) -> None:
        """Decoding rows get their token; a prompt gets more than its share only if no other row can use the step."""
        planned = {work.id: work for work in plan.work}
        decoding = [v.id for v in self.running if v.num_tokens - v.num_computed == 1 and v.id not in plan.preempted]
        assert all(id in planned for id in decoding), "a decoding row was left out"
        largest = max((work.num_tokens for work in plan.work), default=0)
        if decoding or any(work.num_sampled for work in plan.work if work.num_tokens <= share(self.config)):
            assert largest <= share(self.config), "a prompt took more than its share"
            self.num_shared_steps += largest > 1

    def apply(self, id: int, num_tokens: int, num_blocks: int, num_sampled: int) -> None:
        """Take over what one row computed."""
        life = self.lives[id]
        source = self.waiting if any(v.id == id for v in self.waiting) else self.running
        view = next(v for v in source if v.id == id)
        source.remove(view)
        if source is self.waiting and life.started is None:
            life.started = self.now
            for other in self.waiting:
                self.lives[other.id].num_overtakers += other.id < id
        self.free -= num_blocks
        self.num_computed += num_tokens
        held = view.num_blocks + num_blocks
        view = view._replace(num_computed=view.num_computed + num_tokens, num_blocks=held, num_private=held)
        if num_sampled:
            life.first = life.first or self.now
            view = view._replace(num_tokens=view.num_tokens + 1, max_new=view.max_new - 1)
            if not view.max_new:
                life.ended = self.now
                self.free += held
                return
        self.running.append(view)

    def run(self, arrivals: Arrivals, num_steps: int) -> None:
        """Run that many steps with arrivals, then until all have ended."""
        for number in range(num_steps):
            for num_prompt, num_new in arrivals(number):
                self.arrive(num_prompt, num_new)
            self.step()
        for _ in range(10**5):
            if not self.running and not self.waiting:
                return
            self.step()
        pytest.fail("sequences are left that never end")


def limits(budget: int, max_batch_size: int = 256) -> SchedulerConfig:
    return SchedulerConfig(max_batch_size=max_batch_size, max_tokens_per_batch=budget, block_size=16)


def mixed(rng: random.Random, budget: int, load: float, most_new: int = 12) -> Arrivals:
    """Mostly short prompts, some of many steps; on average prompts of `load` times the budget arrive in each step."""

    def size() -> int:
        kind = rng.random()
        if kind < 0.75:
            return rng.randrange(1, 1 + budget // 4)
        return rng.randrange(1, budget) if kind < 0.95 else rng.randrange(budget, 20 * budget)

    chance = load / (0.75 / 8 + 0.2 / 2 + 0.05 * 10.5)  # by the mean size

    def arrivals(number: int) -> list[tuple[int, int]]:
        count = rng.randrange(1, 5) if rng.random() < chance / 2.5 else 0
        return [(size(), rng.randrange(1, most_new)) for _ in range(count)]

    return arrivals


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "load"), [(64, 0.5), (256, 0.8), (256, 1.3), (2048, 0.9)])
def test_every_prompt_draws_its_first_token_within_the_bound(budget: int, load: float) -> None:
    rng = random.Random(budget)
    world = World(limits(budget, max_batch_size=10**4))
    arrivals = mixed(rng, budget, load)
    world.run(lambda number: arrivals(number) if len(world.running) < seats(world.config) - 20 else [], 600)
    assert len(world.lives) > 250 and world.num_shared_steps > 100
    assert all(life.first - life.arrived <= life.bound for life in world.lives)
    waits = sorted(life.first - life.arrived for life in world.lives if life.num_prompt <= budget // 8)
    assert load > 1 or waits[len(waits) * 9 // 10] == 1, "nine of ten short prompts wait for no step of others"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "most_new"), [(0, 12), (1, 100), (3, 200)])
def test_every_sequence_ends_where_seats_and_blocks_are_scarce(seed: int, most_new: int) -> None:
    rng = random.Random(seed)
    budget = rng.choice([64, 256])
    world = World(limits(budget, rng.choice([16, 64])), num_blocks=-(-(20 * budget + 300) // 16))
    world.run(mixed(rng, budget, 0.9, most_new), 300)
    assert len(world.lives) > 250
    assert 50 < max(life.num_overtakers for life in world.lives) <= OVERTAKERS
    assert world.num_lost <= 0.1 * world.num_computed, "preemption discards more than a tenth of the work"


def flood(size: int, num_new: int, count: int) -> Arrivals:
    """The same number of equal requests before every step."""
    return lambda number: [(size, num_new)] * count


def test_an_endless_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    world = World(limits(256))
    world.arrive(30, 5)
    long = world.arrive(6900, 5)
    world.run(flood(60, 1, 5), 400)  # 300 of 256 tokens in each step
    assert long.first is not None and long.first <= long.bound == -(-30 // 32) + -(-6900 // 32) + 1


def test_a_prompt_that_needs_most_blocks_is_overtaken_a_bounded_number_of_times() -> None:
    world = World(limits(256, max_batch_size=64), num_blocks=100)
    for _ in range(20):
        world.arrive(30, 20)
    world.step()
    huge = world.arrive(90 * 16, 2)
    world.run(flood(30, 20, 2), 400)
    assert 50 < huge.num_overtakers <= OVERTAKERS
    assert huge.started is not None and huge.started < 300, "it waited for the end of the flood"


def test_a_short_prompt_overtakes_the_prefill_of_a_long_one() -> None:
    world = World(limits(256))
    long = world.arrive(6900, 9)
    plan = world.step()
    assert [work.num_tokens for work in plan.work] == [256], "alone, a prompt gets the whole budget"
    short = world.arrive(3, 9)
    plan = world.step()
    assert [work.num_tokens for work in plan.work] == [share(world.config), 3]
    assert short.first == world.now and long.first is None
    plan = world.step()
    assert [work.num_tokens for work in plan.work] == [share(world.config), 1], "beside a row that decodes, too"


def test_a_short_prompt_overtakes_a_queue_of_long_ones() -> None:
    world = World(limits(256))
    for _ in range(10):
        world.arrive(6900, 9)
    world.step()
    short = world.arrive(3, 1)
    world.step()
    assert short.first == world.now
    assert len(world.running) == 4, "prompts without a share are not started"
    world.step()
    assert sum(work.num_tokens for work in world.step().work) == 256, "no row decodes: the step is full"


def waiting(*views: SeqView) -> Iterator[SeqView]:
    return iter(views)


def test_followers_of_a_prompt_do_not_slow_it() -> None:
    followers = [SeqView(id, 6900, 0, 0, next_key="same", max_new=9) for id in range(1, 8)]
    leader = SeqView(0, 6900, 0, 0, next_key="same", max_new=9)
    assert [w.num_tokens for w in plan_step(waiting(leader, *followers), [], 10**4, limits(256)).work] == [256]
    leader = leader._replace(num_computed=256, num_blocks=16)
    assert [w.num_tokens for w in plan_step(waiting(*followers), [leader], 10**4, limits(256)).work] == [256]
    other = SeqView(8, 10, 0, 0, next_key="other", max_new=9)
    assert [w.num_tokens for w in plan_step(waiting(*followers, other), [leader], 10**4, limits(256)).work] == [64, 10]


def test_a_long_prompt_that_a_short_one_follows_counts_as_short() -> None:
    busy = [SeqView(id, 6000 + 100 * id, 16, 1, next_key=id) for id in range(8)]
    follower = SeqView(9, 40, 16, 1, next_key=7, max_new=9)
    plain = plan_step((), busy, 10**4, limits(256))
    assert [work.id for work in plain.work] == [0, 1, 2, 3]
    plan = plan_step(waiting(follower), busy, 10**4, limits(256))
    assert [work.id for work in plan.work] == [0, 1, 2, 7], "it computes the block that the short one waits for"
