"""The plan of a step: arithmetic on counts that never spends what it has not, and never loses the oldest."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterable, Iterator

import pytest

from nano_inference.config import SchedulerConfig
from nano_inference.core.scheduler import MAX_READ_BEHIND, STREAM_LOOKAHEAD, SeqView, StepPlan, Work, plan_step, seats

State = tuple[list[SeqView], list[SeqView], int, SchedulerConfig]
States = list[tuple[State, StepPlan]]


def view(id: int, num_tokens: int, num_computed: int = 0, num_blocks: int = 0, **more: object) -> SeqView:
    return SeqView(id=id, num_tokens=num_tokens, num_computed=num_computed, num_blocks=num_blocks, **more)


def config(max_batch_size: int = 8, budget: int = 64, block_size: int = 4, lookahead: int = 1) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_size=max_batch_size, max_tokens_per_batch=budget, block_size=block_size, lookahead=lookahead
    )


def decoding(id: int, num_tokens: int, block_size: int = 4) -> SeqView:
    """A sequence that misses its last token only."""
    num_blocks = -(-(num_tokens - 1) // block_size)
    return view(id, num_tokens, num_tokens - 1, num_blocks, num_private=num_blocks, max_new=9)


def random_state(rng: random.Random) -> State:
    """Any state that an engine could be in."""
    cfg = config(rng.randrange(1, 9), rng.choice([1, 2, 3, 8, 40]), rng.choice([1, 2, 4, 16]), rng.choice([1, 1, 3]))
    running = []
    for id in range(rng.randrange(cfg.max_batch_size + 1)):
        num_tokens = rng.randrange(1, 40)
        num_computed = num_tokens - 1 if rng.random() < 0.6 else rng.randrange(num_tokens)
        num_blocks = -(-num_computed // cfg.block_size) + (rng.random() < 0.2)
        key = rng.choice([None, 1, 2]) if num_tokens - num_computed > 1 else None
        private = rng.randrange(num_blocks + 1)
        more = {"num_private": private, "next_key": key, "max_new": rng.randrange(6)}
        running.append(view(id, num_tokens, num_computed, num_blocks, **more))
    waiting = []
    for id in range(100, 100 + rng.randrange(8)):
        num_tokens = rng.randrange(1, 60)
        num_computed = rng.randrange(num_tokens)
        num_blocks = num_computed // cfg.block_size
        more = {"idle_hit": rng.randrange(num_blocks + 1), "next_key": rng.choice([None, None, 1, 2, 3])}
        waiting.append(view(id, num_tokens, num_computed, num_blocks, max_new=rng.randrange(6), **more))
    return waiting, running, rng.randrange(14), cfg


@pytest.fixture(scope="module")
def states() -> States:
    """Random states with their plans."""
    made = [random_state(random.Random(seed)) for seed in range(3000)]
    return [(state, plan_step(*state)) for state in made]


def decoding_in(plan: StepPlan) -> tuple[int, ...]:
    """Return the ids that compute their last token and sample the next."""
    return tuple(work.id for work in plan.work if work.num_tokens == 1 and work.num_sampled)


def test_plan_respects_budget_and_blocks(states: States) -> None:
    for (waiting, running, free, cfg), plan in states:
        views = {v.id: v for v in (*waiting, *running)}
        admitted = [views[work.id] for work in plan.work if work.id >= 100]
        given_back = sum(views[id].num_private for id in plan.preempted)
        taken = sum(work.num_blocks for work in plan.work) + sum(v.idle_hit for v in admitted)
        assert taken <= free + given_back
        assert sum(work.num_tokens for work in plan.work) <= cfg.max_tokens_per_batch
        assert len(running) - len(plan.preempted) + len(admitted) <= cfg.max_batch_size


def test_every_row_has_the_blocks_it_needs_and_no_more(states: States) -> None:
    for (waiting, running, _, cfg), plan in states:
        views = {v.id: v for v in (*waiting, *running)}
        for work in plan.work:
            v = views[work.id]
            end = v.num_computed + work.num_tokens
            assert v.num_computed < end <= v.num_tokens
            most, fewest = min(cfg.lookahead, v.max_new), min(1, v.max_new)
            assert fewest <= work.num_sampled <= most if end == v.num_tokens else work.num_sampled == 0
            num_slots = end + max(0, work.num_sampled - 1)
            assert work.num_blocks == max(0, -(-num_slots // cfg.block_size) - v.num_blocks)


def test_plan_lists_each_sequence_once_in_order(states: States) -> None:
    for (waiting, running, _, _), plan in states:
        order = [v.id for v in (*running, *waiting)]
        ids = [work.id for work in plan.work]
        assert ids == sorted(set(ids), key=order.index), "oldest first, each once"
        assert not set(ids) & set(plan.preempted)


def test_youngest_are_preempted_and_the_oldest_continues(states: States) -> None:
    num_preempting = 0
    for (_, running, _, _), plan in states:
        ids = [v.id for v in running]
        count = len(plan.preempted)
        assert list(plan.preempted) == ids[::-1][:count]
        if ids and plan.work[:1] != () and plan.work[0].id == ids[0]:
            num_preempting += count > 0
        else:
            assert count == len(ids), "the oldest waits only when no victim is left"
    assert num_preempting > 100


def test_preempting_step_admits_no_sequence(states: States) -> None:
    num_admitting = 0
    for _, plan in states:
        admitted = [work.id for work in plan.work if work.id >= 100]
        assert not (admitted and plan.preempted)
        num_admitting += bool(admitted)
    assert num_admitting > 500


def test_admission_leaves_a_block_for_each_that_runs(states: States) -> None:
    for (waiting, running, free, _), plan in states:
        views = {v.id: v for v in waiting}
        left = free - sum(work.num_blocks for work in plan.work)
        left -= sum(views[work.id].idle_hit for work in plan.work if work.id >= 100)
        if any(work.id >= 100 for work in plan.work):
            assert left >= len(running)


def test_a_plan_is_a_pure_function() -> None:
    for seed in range(200):
        state = random_state(random.Random(seed))
        before = copy.deepcopy(state)
        first = plan_step(*state)
        assert state == before
        assert plan_step(iter(state[0]), tuple(state[1]), *state[2:]) == first


def readable(count: int, *, num_tokens: int = 4, **more: object) -> Iterator[SeqView]:
    """Waiting sequences of which only `count` may be looked at."""
    for id in range(100, 100 + count):
        yield view(id, num_tokens, **more)
    pytest.fail("the queue was read further than there is room")


def test_queue_is_read_only_while_there_is_room() -> None:
    full = [decoding(i, 3) for i in range(3)]
    assert len(plan_step(readable(5), full, 99, config(max_batch_size=8)).work) == 8, "seats"
    assert len(plan_step(readable(0), full, 99, config(max_batch_size=3)).work) == 3, "no seat"
    assert len(plan_step(readable(2), [], 99, config(budget=8)).work) == 2, "budget"
    assert len(plan_step(readable(0), full, 99, config(budget=3)).work) == 3, "no budget"
    assert len(plan_step(readable(2), [], 2, config()).work) == 1, "blocks: one is kept spare for the admitted"
    queue = iter([view(100, 40), *(view(101 + i, 40) for i in range(MAX_READ_BEHIND))])
    assert not plan_step(queue, [], 5, config(max_batch_size=99)).work and len(list(queue)) == 1, (
        "sequences that lack blocks"
    )
    tight = [decoding(i, 5) for i in range(3)]
    assert plan_step(readable(0), tight, 0, config()).preempted == (2, 1), "a step that preempts"


def test_sequence_waits_for_a_block_that_another_computes() -> None:
    waiting = [view(100 + i, 9, next_key="same") for i in range(3)] + [view(103, 9, next_key="other")]
    plan = plan_step(waiting, [], 99, config())
    assert [work.id for work in plan.work] == [100, 103]
    busy = [view(1, 30, 4, 1, next_key="same")]
    assert [work.id for work in plan_step(waiting, busy, 99, config(budget=100)).work] == [1, 103]
    alone = [view(100 + i, 9) for i in range(3)]
    assert len(plan_step(alone, [], 99, config()).work) == 3, "None names no block"
    assert len(plan_step(waiting, [], 99, config(max_batch_size=3)).work) == 1, "a follower keeps its seat"


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    v = view(100, 100, max_new=5)
    plan = plan_step([v], [], 50, config(budget=16))
    seen = []
    while not decoding_in(plan):
        work = plan.work[0]
        seen.append(work)
        done = v.num_computed + work.num_tokens
        v = v._replace(num_computed=done, num_blocks=v.num_blocks + work.num_blocks)
        v = v._replace(num_tokens=v.num_tokens + work.num_sampled)
        plan = plan_step([], [v], 50, config(budget=16))
    assert [work.num_tokens for work in seen] == [16] * 6 + [4]
    assert [work.num_sampled for work in seen] == [0] * 6 + [1]
    assert sum(work.num_blocks for work in seen) == 25


def test_decoding_rows_keep_their_token_while_a_long_prompt_is_read() -> None:
    running = [view(0, 100, 0, 0, max_new=5), *(decoding(i, 6) for i in range(1, 6))]
    plan = plan_step([], running, 99, config(budget=8))
    assert [work.num_tokens for work in plan.work] == [3, 1, 1, 1, 1, 1]
    assert decoding_in(plan) == (1, 2, 3, 4, 5) and {work.id for work in plan.work} == set(range(6))
    plan = plan_step([], running, 99, config(budget=3))
    assert [(work.id, work.num_tokens) for work in plan.work] == [(0, 1), (1, 1), (2, 1)], "the oldest first"
    plan = plan_step([view(100, 50)], running[1:], 99, config(budget=8))
    assert [work.num_tokens for work in plan.work] == [1] * 5 + [3], "newcomers take what is left"


def test_the_oldest_prompt_goes_before_shorter_ones_although_older_rows_decode() -> None:
    running = [decoding(1, 9), view(2, 100), view(3, 10)]
    plan = plan_step((), running, 60, config(budget=20))
    assert [(work.id, work.num_tokens) for work in plan.work] == [(1, 1), (2, 10), (3, 9)]


@pytest.mark.parametrize(("budget", "count"), [(1, 1), (2, 1), (3, 2), (8, 7), (9, 8), (64, 8)])
def test_as_many_sequences_run_as_can_decode_beside_a_prompt(budget: int, count: int) -> None:
    assert seats(config(max_batch_size=8, budget=budget)) == count


def test_lookahead_reserves_the_slots_of_tokens_not_yet_drawn() -> None:
    row = decoding(0, 8)._replace(max_new=9)
    assert plan_step([], [row], 9, config(lookahead=1)).work == (Work(0, 1, 0, 1),)
    assert plan_step([], [row], 9, config(lookahead=2)).work == (Work(0, 1, 1, 2),)
    assert plan_step([], [row], 9, config(lookahead=6)).work == (Work(0, 1, 2, 6),)
    assert plan_step([], [row._replace(max_new=1)], 9, config(lookahead=6)).work == (Work(0, 1, 0, 1),)
    scoring = view(100, 8, max_new=0)
    assert plan_step([scoring], [], 9, config(lookahead=6)).work == (Work(100, 8, 2, 0),)


def test_lookahead_changes_neither_the_rows_of_a_step_nor_who_is_preempted(states: States) -> None:
    num_ahead = 0
    for (waiting, running, free, cfg), plan in states:
        single = plan_step(waiting, running, free, dataclasses.replace(cfg, lookahead=1))
        assert [work[:2] for work in plan.work] == [work[:2] for work in single.work]
        assert plan.preempted == single.preempted
        num_ahead += sum(work.num_sampled > 1 for work in plan.work)
    assert num_ahead > 50


def sampled(waiting: Iterable[SeqView], *running: SeqView, free: int = 99, lookahead: int = 16) -> list[int]:
    """Return how many tokens each row of a step samples."""
    return [work.num_sampled for work in plan_step(waiting, running, free, config(lookahead=lookahead)).work]


def test_rows_sample_one_token_while_a_prompt_is_computed() -> None:
    rows = [decoding(0, 8)._replace(max_new=99), decoding(1, 9)._replace(max_new=99)]
    assert sampled((), *rows) == [16, 16]
    assert sampled((), *rows, view(2, 20, max_new=99)) == [1, 1, 1], "a running prompt"
    assert sampled((), *rows, view(2, 200, max_new=99)) == [1, 1, 0], "a chunk of one"
    assert sampled([view(100, 20, max_new=99)], *rows) == [1, 1, 1], "a prompt that starts"


def test_rows_sample_few_tokens_while_a_client_reads() -> None:
    rows = [decoding(id, 8)._replace(max_new=99) for id in range(8)]
    streamed = rows[0]._replace(is_streamed=True)
    assert sampled((), streamed, *rows[1:3]) == [STREAM_LOOKAHEAD] * 3
    assert sampled((), streamed, *rows[1:3], lookahead=2) == [2] * 3, "never more than configured"
    assert sampled([view(100, 20)], *rows) == [16] * 8, "a sequence without a seat waits"


def test_a_row_samples_no_more_than_it_may() -> None:
    rows = [decoding(0, 8)._replace(max_new=99, max_ahead=3), decoding(1, 8)._replace(max_new=2), decoding(2, 8)]
    assert sampled((), *rows) == [3, 2, 9]


def test_lookahead_takes_free_blocks_only() -> None:
    rows = [decoding(0, 9)._replace(max_new=99), decoding(1, 9)._replace(max_new=99)]  # 2 blocks held, 24 slots wanted
    assert sampled((), *rows, free=8) == [16, 16]
    assert sampled((), *rows, free=7) == [1, 1]


def test_a_row_with_drafts_does_not_look_ahead() -> None:
    rows = [decoding(0, 8)._replace(num_drafts=3, draft_chance=1.0), decoding(1, 8)]
    cfg = dataclasses.replace(config(lookahead=4), max_draft_tokens=5, weight_tokens=30)
    plan = plan_step((), rows, 99, cfg)
    assert [(work.num_sampled, work.num_drafts) for work in plan.work] == [(1, 3), (4, 0)]


def test_preemption_stops_as_soon_as_there_is_room() -> None:
    running = [decoding(i, 5) for i in range(4)]  # each needs one more block and holds one
    seen = [(p.preempted, [w.id for w in p.work]) for p in (plan_step([], running, n, config()) for n in range(5))]
    assert seen == [((3, 2), [0, 1]), ((3, 2), [0, 1]), ((3,), [0, 1, 2]), ((3,), [0, 1, 2]), ((), [0, 1, 2, 3])]


def guessing(state: State, rng: random.Random) -> State:
    """The same state with guesses about anybody, good and bad."""
    waiting, running, free, cfg = state
    cfg = dataclasses.replace(cfg, lookahead=1, max_draft_tokens=5, weight_tokens=rng.choice([1, 4, 30]))
    guessed = [v._replace(num_drafts=rng.randrange(6), draft_chance=rng.random()) for v in running]
    return waiting, guessed, rng.choice([free, free + 9]), cfg


def test_drafts_use_only_the_rest_of_the_budget() -> None:
    num_guessing = num_taking = num_cut = 0
    for seed in range(1500):
        rng = random.Random(seed)
        waiting, running, free, cfg = guessing(random_state(rng), rng)
        plan = plan_step(waiting, running, free, cfg)
        plain = plan_step(waiting, running, free, dataclasses.replace(cfg, max_draft_tokens=0))
        views = {v.id: v for v in (*waiting, *running)}
        assert [work[:2] + work[3:4] for work in plan.work] == [work[:2] + work[3:4] for work in plain.work]
        assert (plan.preempted, decoding_in(plan)) == (plain.preempted, decoding_in(plain))
        assert sum(work.num_tokens + work.num_drafts for work in plan.work) <= cfg.max_tokens_per_batch
        left = free - sum(work.num_blocks for work in plan.work)
        left -= sum(views[work.id].idle_hit for work in plan.work if work.id >= 100)
        for work, without in zip(plan.work, plain.work, strict=True):
            v = views[work.id]
            if not work.num_drafts:
                assert work == without
                continue
            assert work.id in decoding_in(plan) and work.num_drafts <= min(v.num_drafts, v.max_new - 1)
            num_slots = v.num_tokens + work.num_drafts
            assert work.num_blocks == max(0, -(-num_slots // cfg.block_size) - v.num_blocks)
            assert not plan.preempted
            assert work.num_blocks == without.num_blocks or left >= len(plan.work), "a block for each that runs"
            num_guessing += 1
            num_taking += work.num_blocks > without.num_blocks
        num_cut += sum(w.num_drafts for w in plan.work) < sum(
            w.num_drafts for w in plan_step([], running, 99, cfg).work
        )
    assert min(num_guessing, num_taking, num_cut) > 30, (num_guessing, num_taking, num_cut)


def test_drafts_leave_one_block_for_each_row() -> None:
    rows = [decoding(i, 4)._replace(num_drafts=3, draft_chance=0.99) for i in range(2)]
    cfg = dataclasses.replace(config(), max_draft_tokens=5)
    plans = [plan_step([], rows, free, cfg).work for free in (0, 2, 3, 4)]
    assert [[(w.num_blocks, w.num_drafts) for w in plan] for plan in plans] == [
        [(0, 0), (0, 0)], [(0, 0), (0, 0)], [(1, 3), (0, 0)], [(1, 3), (1, 3)]
    ]  # fmt: skip
    last = [rows[0]._replace(max_new=1), rows[1]._replace(max_new=2)]
    assert [w.num_drafts for w in plan_step([], last, 9, cfg).work] == [0, 1], "no further than it may go"
    busy = [view(0, 60), *(row._replace(id=row.id + 1) for row in rows), view(3, 60), view(4, 12)]
    plan = plan_step([], busy, 99, cfg)
    assert [(w.num_tokens, w.num_drafts) for w in plan.work] == [(24, 0), (1, 1), (1, 1), (24, 0), (12, 0)], "62 of 64"
