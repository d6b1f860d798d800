"""Decides one step: which sequences compute how many tokens. Arithmetic on counts; it owns nothing and cannot fail.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed`, and the token budget
of the step lets it catch up. Guesses (`speculate`) get what all that leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nano_inference.config import SchedulerConfig
from nano_inference.speculate import Offer, choose_drafts
from nano_inference.types import SchedulerOutput, SeqView, Work


class _Plan:
    """A plan in the making: what is left of the budget and of the blocks, and what was promised."""

    def __init__(self, running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig) -> None:
        self.config = config
        self.live = list(running)
        self.free = num_free_blocks
        self.budget = config.max_tokens_per_batch
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
    """Plan one step. Pure: the same views give the same plan.

    `running` comes oldest first; when blocks run out, victims are taken from its young end. `waiting` comes in order of
    admission and may be lazy: it is read only as far as there is room. A waiting sequence whose next block somebody is
    about to compute (`next_key`) waits for it instead of computing it again.
    """
    plan = _Plan(running, num_free_blocks, config)
    _continue_running(plan)
    if not plan.preempted:
        _admit_waiting(plan, waiting)
        _add_guesses(plan)
    is_decode = [work.num_tokens == 1 and work.num_sampled > 0 for work in plan.work]
    return SchedulerOutput(
        prefill_seqs=tuple(w.id for w, decode in zip(plan.work, is_decode, strict=True) if not decode),
        decode_seqs=tuple(w.id for w, decode in zip(plan.work, is_decode, strict=True) if decode),
        preempted_seqs=tuple(plan.preempted),
        work=tuple(plan.work),
    )


def _continue_running(plan: _Plan) -> None:
    """Give every running sequence its part, oldest first, keeping one token of budget for each that decodes."""
    num_decoding = sum(_behind(view) == 1 for view in plan.live)
    index = 0
    while index < len(plan.live) and plan.budget > 0:
        view = plan.live[index]
        num_decoding -= _behind(view) == 1
        work = plan.work_for(view, min(_behind(view), max(1, plan.budget - num_decoding)))
        if not _make_room(plan, index, work):
            return
        plan.promise(view, work)
        index += 1


def _make_room(plan: _Plan, index: int, work: Work) -> bool:
    """Preempt from the young end until the work fits; the sequence itself when nobody younger is left."""
    while work.num_blocks > plan.free:
        victim = plan.live.pop()
        plan.preempted.append(victim.id)
        plan.free += victim.num_private
        if len(plan.live) == index:
            return False
    return True


def _admit_waiting(plan: _Plan, waiting: Iterable[SeqView]) -> None:
    """Start waiting sequences in order while budget, seats and blocks last. A follower keeps its seat."""
    taken = {view.next_key for view in plan.live if view.next_key is not None and _behind(view) > 1}
    num_seats = plan.config.max_batch_size - len(plan.live)
    if plan.budget <= 0 or num_seats <= 0:
        return
    spare = len(plan.live)  # a block for each that runs: admitting into the last ones would only preempt again
    for view in waiting:
        num_seats -= 1
        if view.next_key is None or view.next_key not in taken:
            work = plan.work_for(view, min(_behind(view), plan.budget))
            if work.num_blocks + view.idle_hit + spare > plan.free:
                return
            plan.promise(view, work)
            taken.add(view.next_key)
            spare += 1
        if plan.budget <= 0 or num_seats <= 0:
            return


def _add_guesses(plan: _Plan) -> None:
    """Let rows that only draw compute guessed tokens too, where that pays, out of what is left of the budget.

    A block for them comes from those that are free beside one for each that runs; it is given back after the step
    unless the guesses were right, so nobody lacks it in the next one.
    """
    config = plan.config
    if not config.max_draft_tokens or plan.budget <= 0:
        return
    running = tuple(zip(plan.live, plan.work, strict=False))  # the admitted stand behind them
    offers = [
        Offer(min(view.num_drafts, view.max_new - 1) if _behind(view) == 1 else 0, view.draft_chance)
        for view, _ in running
    ]
    num_tokens = config.max_tokens_per_batch - plan.budget
    counts = choose_drafts(offers, num_tokens, plan.budget, config.weight_tokens)
    spare = plan.free - len(plan.work)
    for index, ((view, work), count) in enumerate(zip(running, counts, strict=True)):
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
