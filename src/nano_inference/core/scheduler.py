"""Plans a step: which sequences compute how many tokens. A pure function of counts.

There are no prefill and decode phases: a sequence has `num_tokens - num_computed` tokens left to compute, and each step
distributes a token budget. Draft tokens get what is left of it.

Fair share. Ids ascend in order of arrival, so the smallest id is the oldest. A prompt is a running or waiting sequence
with more than one token left to compute. In each step:

1. Every decoding row gets its token.
2. The oldest prompt gets up to `share` tokens, then the others do, shortest first, while the budget lasts.
3. If no row decodes and no prompt ends in this step, no client waits for the end of the step: prompts also get the rest
   of the budget, oldest first. So a single prompt gets the whole budget.

`seats` leaves room for `reserve` tokens after the decoding rows, so the oldest prompt computes at least that many in
each step. While there are seats and blocks for it, a prompt whose older prompts have n_1 … n_k tokens samples its first
token at most Σ ceil(n_i / reserve) steps after it arrived, itself included in the sum. While it lacks seats or blocks,
at most `OVERTAKERS` younger sequences start before it. Verified by tests/sim/test_fair_share.py.

Lookahead. An executor may sample up to `SchedulerConfig.lookahead` tokens of a decoding row in one step, which saves
the host's work between them. Nothing else can happen meanwhile: in a step that computes a prompt, a row samples one
token; while a client reads tokens as they come, at most `STREAM_LOOKAHEAD`. Blocks are reserved for all of them, but no
sequence is preempted for more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nano_inference.config import SchedulerConfig
from nano_inference.core.drafting import Offer, choose_drafts

OVERTAKERS = 256  # most younger sequences that start while an older one waits for blocks or for budget
MAX_READ_BEHIND = 32  # most queued sequences read in one step after the first one that cannot be computed whole
STREAM_LOOKAHEAD = 4  # most tokens of a row in one step while a client reads tokens as they come


class SeqView(NamedTuple):
    """A sequence as the scheduler sees it: counts, never tokens."""

    id: int
    num_tokens: int
    num_computed: int  # tokens whose K/V exists; for a waiting sequence, tokens whose K/V is cached
    num_blocks: int  # blocks held; for a waiting sequence, whole blocks that are cached
    num_private: int = 0  # held blocks that no other sequence holds
    idle_hit: int = 0  # cached blocks that are in the free list
    next_key: object = None
    """Identifies the block computed next: two sequences with equal keys would compute the same K/V."""
    max_new: int = 1  # most tokens it may still add
    max_ahead: int = 1 << 30  # most tokens to sample in one step, see `Sequence.max_ahead`
    is_streamed: bool = False  # a client reads its tokens as they come
    num_drafts: int = 0
    draft_chance: float = 0.0  # probability that a draft token is accepted if those before it are


class Work(NamedTuple):
    """One sequence's part in a step."""

    id: int
    num_tokens: int  # tokens to compute, from `num_computed` on
    num_blocks: int  # fresh blocks to take
    num_sampled: int  # most tokens to sample; 0 if tokens are left to compute after this step
    num_drafts: int = 0  # draft tokens to compute after those; one more token is sampled at each


def share(config: SchedulerConfig) -> int:
    """Return the tokens of a step that one prompt gets while other sequences decode or a prompt ends in the step.

    A quarter of the budget, because a CPU step's duration is proportional to its tokens; more if reading the weights
    would take over a fifth of the step; at most half of the budget.
    """
    budget = config.max_tokens_per_batch
    return max(1, min(budget // 2, max(budget // 4, 4 * config.weight_tokens)))


def reserve(config: SchedulerConfig) -> int:
    """Return the tokens of a step that decoding rows always leave to the oldest prompt."""
    return min(share(config), max(1, config.max_tokens_per_batch // 8))


def seats(config: SchedulerConfig) -> int:
    """Return the most sequences that run at the same time."""
    return min(config.max_batch_size, max(1, config.max_tokens_per_batch - reserve(config)))


class StepPlan(NamedTuple):
    """What one step computes."""

    work: tuple[Work, ...]  # every scheduled sequence, oldest first
    preempted: tuple[int, ...]  # ids whose blocks are taken away, youngest first


class _Plan:
    """A plan under construction, with the remaining budget and free blocks."""

    def __init__(self, running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig) -> None:
        self.config = config
        self.live = list(running)
        self.free = num_free_blocks
        self.budget = config.max_tokens_per_batch
        self.lookahead = 1
        self.num_decoding = sum(_num_left(view) <= 1 for view in running)
        self.work: list[Work] = []
        self.preempted: list[int] = []

    def work_for(self, view: SeqView, num_tokens: int) -> Work:
        """Return the work of computing `num_tokens` more tokens of a sequence, and the blocks it needs."""
        end = view.num_computed + num_tokens
        num_sampled = min(self.lookahead, view.max_new, view.max_ahead) if end == view.num_tokens else 0
        num_slots = end + max(0, num_sampled - 1)
        num_blocks = max(0, -(-num_slots // self.config.block_size) - view.num_blocks)
        return Work(view.id, num_tokens, num_blocks, num_sampled)

    def add(self, view: SeqView, work: Work) -> None:
        """Add work to the plan and subtract its tokens and blocks."""
        self.work.append(work)
        self.budget -= work.num_tokens
        self.free -= work.num_blocks + view.idle_hit


def plan_step(
    waiting: Iterable[SeqView], running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig
) -> StepPlan:
    """Return the plan of one step; equal arguments give equal plans.

    `running` is ordered oldest first; without free blocks, the youngest are preempted. `waiting` is in order of
    admission and may be lazy: it is read only while there is room, and not at all if it is an empty tuple. A waiting
    sequence whose next block another sequence is about to compute (equal `next_key`) waits for that block.
    """
    plan = _Plan(running, num_free_blocks, config)
    newcomers, urgent = _read_queue(plan, waiting)
    has_prompts = plan.num_decoding < len(plan.live)
    prompts = [view for view in plan.live if _num_left(view) > 1] if has_prompts else []
    shares = _share_budget(plan, prompts + newcomers, urgent)
    if config.lookahead > 1 and not prompts and not newcomers:
        _look_ahead(plan)
    _continue_running(plan, shares)
    if not plan.preempted:
        num_running = len(plan.work)
        for view in newcomers:  # those that have a share, in order of admission; `_read_queue` counted their blocks
            if view.id in shares:
                plan.add(view, plan.work_for(view, shares[view.id]))
        _add_drafts(plan, num_running)
    return StepPlan(tuple(plan.work), tuple(plan.preempted))


def _read_queue(plan: _Plan, waiting: Iterable[SeqView]) -> tuple[list[SeqView], dict[object, int]]:
    """Return the waiting sequences that can start, and for each `next_key` the fewest tokens a follower has left.

    A sequence starts only if there are blocks for its whole prompt, after those that running sequences need for theirs
    and one more for each: otherwise several growing prompts would preempt each other. Shorter ones may overtake a
    sequence that lacks blocks. A follower (its next block is being computed) and a sequence without blocks use a seat.
    """
    found: list[SeqView] = []
    urgent: dict[object, int] = {}
    if waiting == ():
        return found, urgent
    taken = {view.next_key for view in plan.live if view.next_key is not None and _num_left(view) > 1}
    num_seats = seats(plan.config) - len(plan.live)
    budget = plan.budget - plan.num_decoding
    if budget <= 0 or num_seats <= 0:
        return found, urgent
    room = plan.free - sum(plan.work_for(view, _num_left(view)).num_blocks + 1 for view in plan.live)
    if room < 0:
        return found, urgent
    part, last_id, num_left = share(plan.config), None, MAX_READ_BEHIND
    for view in waiting:
        num_seats -= 1
        if last_id is not None and view.id > last_id:
            break
        if view.next_key is not None and view.next_key in taken:
            urgent[view.next_key] = min(_num_left(view), urgent.get(view.next_key, _num_left(view)))
        else:
            need = plan.work_for(view, _num_left(view)).num_blocks + view.idle_hit
            has_blocks = need <= room
            taken.add(view.next_key)
            if has_blocks:
                found.append(view)
                room -= need + 1
            if has_blocks and _num_left(view) <= part:
                budget -= _num_left(view)
            else:
                last_id = view.id + OVERTAKERS if last_id is None else min(last_id, view.id + OVERTAKERS)
            if not has_blocks and room <= 0:
                break
        num_left -= last_id is not None
        if budget <= 0 or num_seats <= 0 or num_left <= 0:
            break
    return found, urgent


def _share_budget(plan: _Plan, prompts: Sequence[SeqView], urgent: Mapping[object, int]) -> dict[int, int]:
    """Return how many tokens each prompt computes in this step; missing ids compute none.

    The shortest sequence that waits for a prompt's next block (`urgent`) can raise the prompt's priority.
    """
    if not prompts:
        return {}
    oldest = min(prompts, key=lambda view: view.id)
    others = [view for view in prompts if view is not oldest]
    others.sort(key=lambda view: (min(_num_left(view), urgent.get(view.next_key, _num_left(view))), view.id))
    part, left = share(plan.config), max(1, plan.budget - plan.num_decoding)
    shares: dict[int, int] = {}
    for view in (oldest, *others):
        if left <= 0:
            break
        shares[view.id] = min(_num_left(view), part, left)
        left -= shares[view.id]
    if plan.num_decoding or any(shares.get(view.id) == _num_left(view) for view in prompts):
        return shares
    for view in sorted(prompts, key=lambda view: view.id):
        more = min(_num_left(view) - shares.get(view.id, 0), left)
        if more > 0:
            shares[view.id] = shares.get(view.id, 0) + more
            left -= more
    return shares


def _look_ahead(plan: _Plan) -> None:
    """Set how many tokens a row samples in this step: more than one only if blocks for all rows are free."""
    is_streaming = any(view.is_streamed for view in plan.live)
    plan.lookahead = min(plan.config.lookahead, STREAM_LOOKAHEAD) if is_streaming else plan.config.lookahead
    most_of_a_row = plan.lookahead // plan.config.block_size + 2
    if len(plan.live) * most_of_a_row <= plan.free:
        return
    if sum(plan.work_for(view, _num_left(view)).num_blocks for view in plan.live) > plan.free:
        plan.lookahead = 1


def _continue_running(plan: _Plan, shares: Mapping[int, int]) -> None:
    """Add every running sequence, oldest first: one token, or its share if it has more than one left."""
    index = 0
    while index < len(plan.live) and plan.budget > 0:
        view = plan.live[index]
        num_tokens = min(shares.get(view.id, 0), plan.budget) if _num_left(view) > 1 else _num_left(view)
        if num_tokens:
            work = plan.work_for(view, num_tokens)
            if not _make_room(plan, index, work):
                return
            plan.add(view, work)
        index += 1


def _make_room(plan: _Plan, index: int, work: Work) -> bool:
    """Preempt the youngest until the work fits; return False if that preempted the sequence itself."""
    while work.num_blocks > plan.free:
        victim = plan.live.pop()
        plan.preempted.append(victim.id)
        plan.free += victim.num_private
        if len(plan.live) == index:
            return False
    return True


def _add_drafts(plan: _Plan, num_running: int) -> None:
    """Add draft tokens to decoding rows from the rest of the budget, where `choose_drafts` expects a gain.

    The first `num_running` rows of the plan are those of running sequences. One free block is kept for each row; drafts
    may use the others, and blocks that rejected drafts leave unused are released after the step.
    """
    config = plan.config
    if not config.max_draft_tokens or plan.budget <= 0:
        return
    views = {view.id: view for view in plan.live}
    running = tuple((views[work.id], work) for work in plan.work[:num_running])
    offers = [
        Offer(min(view.num_drafts, view.max_new - 1) if _num_left(view) == 1 else 0, view.draft_chance)
        for view, _ in running
    ]
    num_tokens = config.max_tokens_per_batch - plan.budget
    counts = choose_drafts(offers, num_tokens, plan.budget, config.weight_tokens)
    spare = plan.free - len(plan.work)
    for index, ((view, work), count) in enumerate(zip(running, counts, strict=True)):
        if not count:
            continue
        held = view.num_blocks + work.num_blocks
        more = max(0, -(-(view.num_tokens + count) // config.block_size) - held)
        if more > spare:
            count, more = min(count, held * config.block_size - view.num_tokens), 0
        if count:
            spare -= more
            plan.work[index] = work._replace(num_blocks=work.num_blocks + more, num_sampled=1, num_drafts=count)


def _num_left(view: SeqView) -> int:
    """Return how many tokens of a sequence have no K/V yet."""
    return view.num_tokens - view.num_computed
