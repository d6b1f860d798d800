"""Decides one step: which sequences compute how many tokens. Arithmetic on counts; it owns nothing and cannot fail.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed`, and the token budget
of the step lets it catch up. Draft tokens get the rest of it.

Fair share. Ids ascend in order of arrival, so the smallest id is the oldest. A prompt is a sequence that is behind by
more than one token, or that waits. In each step:

1. Every decoding row gets its token.
2. The oldest prompt gets up to `share` tokens, then the others do, shortest first, while the budget lasts.
3. If no row decodes and no prompt ends in this step, no client waits for the end of the step: the rest of the budget
   goes to the prompts too, oldest first. So a prompt that is alone gets the whole budget.

`seats` leaves room for `reserve` tokens beside the decoding rows, so the oldest prompt computes at least that many in
each step, and a prompt whose older prompts are n_1 … n_k tokens long draws its first token at the latest
Σ ceil(n_i / reserve), itself included, steps after it arrived, as long as there are seats and blocks for it. While it
lacks those, at most `OVERTAKERS` younger sequences are started before it. tests/sim/test_fair_share.py holds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nano_inference.config import SchedulerConfig
from nano_inference.ngram_drafter import Offer, choose_drafts
from nano_inference.types import SchedulerOutput, SeqView, Work

OVERTAKERS = 256
"""Most younger sequences that are started while an older one waits for blocks or for budget."""
LOOKAHEAD = 32
"""Most views of the queue that are read in one step behind the first one that cannot be served whole."""


def share(config: SchedulerConfig) -> int:
    """Return the tokens of a step that one prompt gets while others wait or decode.

    A quarter of the budget, because the duration of a step on a CPU is proportional to its tokens; but enough that
    reading the weights is at most a fifth of the step, and at most half of the budget.
    """
    budget = config.max_tokens_per_batch
    return max(1, min(budget // 2, max(budget // 4, 4 * config.weight_tokens)))


def reserve(config: SchedulerConfig) -> int:
    """Return the tokens of a step that decoding rows leave to the oldest prompt."""
    return min(share(config), max(1, config.max_tokens_per_batch // 8))


def seats(config: SchedulerConfig) -> int:
    """Return the most sequences that run at once."""
    return min(config.max_batch_size, max(1, config.max_tokens_per_batch - reserve(config)))


class StepPlan(NamedTuple):
    """What a step computes."""

    work: tuple[Work, ...]
    """Every scheduled sequence, oldest first."""
    preempted: tuple[int, ...]
    """Ids that give their blocks back, youngest first."""


class _Plan:
    """A plan in the making: what is left of the budget and of the blocks, and what was promised."""

    def __init__(self, running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig) -> None:
        self.config = config
        self.live = list(running)
        self.free = num_free_blocks
        self.budget = config.max_tokens_per_batch
        self.num_decoding = sum(_behind(view) <= 1 for view in running)
        self.work: list[Work] = []
        self.preempted: list[int] = []

    def work_for(self, view: SeqView, num_tokens: int) -> Work:
        """Return the work of computing `num_tokens` more tokens of a sequence, with the blocks that it needs."""
        end = view.num_computed + num_tokens
        num_sampled = min(self.config.lookahead, view.max_new) if end == view.num_tokens else 0
        num_slots = end + max(0, num_sampled - 1)
        num_blocks = max(0, -(-num_slots // self.config.block_size) - view.num_blocks)
        return Work(view.id, num_tokens, num_blocks, num_sampled)

    def promise(self, view: SeqView, work: Work) -> None:
        """Put work into the plan and take its cost off what is left."""
        self.work.append(work)
        self.budget -= work.num_tokens
        self.free -= work.num_blocks + view.idle_hit


def schedule(
    waiting: Iterable[SeqView], running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig
) -> SchedulerOutput:
    """Plan one step, as `plan_step` does, and say which sequences prefill and which decode."""
    plan = plan_step(waiting, running, num_free_blocks, config)
    is_decode = [work.num_tokens == 1 and work.num_sampled > 0 for work in plan.work]
    return SchedulerOutput(
        prefill_seqs=tuple(w.id for w, decode in zip(plan.work, is_decode, strict=True) if not decode),
        decode_seqs=tuple(w.id for w, decode in zip(plan.work, is_decode, strict=True) if decode),
        preempted_seqs=plan.preempted,
        work=plan.work,
    )


def plan_step(
    waiting: Iterable[SeqView], running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig
) -> StepPlan:
    """Plan one step. Pure: the same views give the same plan.

    `running` comes oldest first; when blocks run out, victims are taken from its young end. `waiting` comes in order of
    admission and may be lazy: it is read only as far as there is room. For an empty tuple no room is computed. A
    waiting sequence whose next block another one is about to compute (`next_key`) waits for it instead of computing it
    again.
    """
    plan = _Plan(running, num_free_blocks, config)
    newcomers, urgent = _read_queue(plan, waiting)
    has_prompts = plan.num_decoding < len(plan.live)
    prompts = [view for view in plan.live if _behind(view) > 1] if has_prompts else []
    shares = _share_budget(plan, prompts + newcomers, urgent)
    _continue_running(plan, shares)
    if not plan.preempted:
        num_running = len(plan.work)
        _start_newcomers(plan, newcomers, shares)
        _add_guesses(plan, num_running)
    return StepPlan(tuple(plan.work), tuple(plan.preempted))


def _read_queue(plan: _Plan, waiting: Iterable[SeqView]) -> tuple[list[SeqView], dict[object, int]]:
    """Return the waiting sequences that could start now, and how many tokens the shortest follower of a key is behind.

    One that starts has blocks for all of its prompt, beside those that the running ones need for theirs and one more
    for each: several prompts that grow at once would otherwise preempt each other. One that does not find them lets
    shorter ones overtake it. A follower, and one that finds no blocks, keeps its seat.
    """
    found: list[SeqView] = []
    urgent: dict[object, int] = {}
    if waiting == ():
        return found, urgent
    taken = {view.next_key for view in plan.live if view.next_key is not None and _behind(view) > 1}
    num_seats = seats(plan.config) - len(plan.live)
    budget = plan.budget - plan.num_decoding
    if budget <= 0 or num_seats <= 0:
        return found, urgent
    room = plan.free - sum(plan.work_for(view, _behind(view)).num_blocks + 1 for view in plan.live)
    if room < 0:
        return found, urgent
    part, last_id, num_left = share(plan.config), None, LOOKAHEAD
    for view in waiting:
        num_seats -= 1
        if last_id is not None and view.id > last_id:
            break
        if view.next_key is not None and view.next_key in taken:
            urgent[view.next_key] = min(_behind(view), urgent.get(view.next_key, _behind(view)))
        else:
            need = plan.work_for(view, _behind(view)).num_blocks + view.idle_hit
            is_roomy = need <= room
            taken.add(view.next_key)
            if is_roomy:
                found.append(view)
                room -= need + 1
            if is_roomy and _behind(view) <= part:
                budget -= _behind(view)
            else:
                last_id = view.id + OVERTAKERS if last_id is None else min(last_id, view.id + OVERTAKERS)
            if not is_roomy and room <= 0:
                break
        num_left -= last_id is not None
        if budget <= 0 or num_seats <= 0 or num_left <= 0:
            break
    return found, urgent


def _share_budget(plan: _Plan, prompts: Sequence[SeqView], urgent: Mapping[object, int]) -> dict[int, int]:
    """Return how many tokens each prompt computes in this step; those that are not named compute none.

    A prompt counts as short as the shortest sequence that waits for its next block.
    """
    if not prompts:
        return {}
    oldest = min(prompts, key=lambda view: view.id)
    others = [view for view in prompts if view is not oldest]
    others.sort(key=lambda view: (min(_behind(view), urgent.get(view.next_key, _behind(view))), view.id))
    part, left = share(plan.config), max(1, plan.budget - plan.num_decoding)
    shares: dict[int, int] = {}
    for view in (oldest, *others):
        if left <= 0:
            break
        shares[view.id] = min(_behind(view), part, left)
        left -= shares[view.id]
    if plan.num_decoding or any(shares.get(view.id) == _behind(view) for view in prompts):
        return shares
    for view in sorted(prompts, key=lambda view: view.id):
        more = min(_behind(view) - shares.get(view.id, 0), left)
        if more > 0:
            shares[view.id] = shares.get(view.id, 0) + more
            left -= more
    return shares


def _continue_running(plan: _Plan, shares: Mapping[int, int]) -> None:
    """Give every running sequence its part, oldest first: one token, or its share when it is behind by more."""
    index = 0
    while index < len(plan.live) and plan.budget > 0:
        view = plan.live[index]
        num_tokens = min(shares.get(view.id, 0), plan.budget) if _behind(view) > 1 else _behind(view)
        if num_tokens:
            work = plan.work_for(view, num_tokens)
            if not _make_room(plan, index, work):
                return
            plan.promise(view, work)
        index += 1


def _make_room(plan: _Plan, index: int, work: Work) -> bool:
    """Preempt from the young end until the work fits; the sequence itself when no younger one is left."""
    while work.num_blocks > plan.free:
        victim = plan.live.pop()
        plan.preempted.append(victim.id)
        plan.free += victim.num_private
        if len(plan.live) == index:
            return False
    return True


def _start_newcomers(plan: _Plan, newcomers: Iterable[SeqView], shares: Mapping[int, int]) -> None:
    """Start the waiting sequences that have a share, in order of admission. Their blocks were counted before."""
    for view in newcomers:
        if view.id in shares:
            plan.promise(view, plan.work_for(view, shares[view.id]))


def _add_guesses(plan: _Plan, num_running: int) -> None:
    """Let rows that only draw compute guessed tokens too, where that pays, out of what is left of the budget.

    The first `num_running` rows of the plan are those of running sequences. A block for guesses comes from those that
    are free beside one for each that runs; it is given back after the step unless the guesses were right, so no row
    lacks it in the next one.
    """
    config = plan.config
    if not config.max_draft_tokens or plan.budget <= 0:
        return
    views = {view.id: view for view in plan.live}
    running = tuple((views[work.id], work) for work in plan.work[:num_running])
    offers = [
        Offer(min(view.num_drafts, view.max_new - 1) if _behind(view) == 1 else 0, view.draft_chance)
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
            plan.work[index] = work._replace(num_blocks=work.num_blocks + more, num_drafts=count)


def _behind(view: SeqView) -> int:
    """Tokens of a sequence whose K/V is still to be computed."""
    return view.num_tokens - view.num_computed
