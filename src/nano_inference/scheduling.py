"""Decides one step: which sequences compute how many tokens. Arithmetic on counts; it owns nothing and cannot fail.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed`, and the token budget
of the step lets it catch up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nano_inference.config import SchedulerConfig
from nano_inference.types import SchedulerOutput, SeqView, Work


class _Draft:
    """A plan in the making: what is left of the budget and of the blocks, and what was promised."""

    def __init__(self, running: Sequence[SeqView], num_free_blocks: int, config: SchedulerConfig) -> None:
        self.config = config
        self.live = list(running)
        self.free = num_free_blocks
        self.budget = config.max_tokens_per_batch
        self.work: list[Work] = []
        self.preempted: list[int] = []

    def draft(self, view: SeqView, num_tokens: int) -> Work:
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
    draft = _Draft(running, num_free_blocks, config)
    _continue_running(draft)
    if not draft.preempted:
        _admit_waiting(draft, waiting)
    is_decode = [work.num_tokens == 1 and work.num_sampled > 0 for work in draft.work]
    return SchedulerOutput(
        prefill_seqs=tuple(w.id for w, decode in zip(draft.work, is_decode, strict=True) if not decode),
        decode_seqs=tuple(w.id for w, decode in zip(draft.work, is_decode, strict=True) if decode),
        preempted_seqs=tuple(draft.preempted),
        work=tuple(draft.work),
    )


def _continue_running(draft: _Draft) -> None:
    """Give every running sequence its part, oldest first, keeping one token of budget for each that decodes."""
    num_decoding = sum(_behind(view) == 1 for view in draft.live)
    index = 0
    while index < len(draft.live) and draft.budget > 0:
        view = draft.live[index]
        num_decoding -= _behind(view) == 1
        work = draft.draft(view, min(_behind(view), max(1, draft.budget - num_decoding)))
        if not _make_room(draft, index, work):
            return
        draft.promise(view, work)
        index += 1


def _make_room(draft: _Draft, index: int, work: Work) -> bool:
    """Preempt from the young end until the work fits; the sequence itself when nobody younger is left."""
    while work.num_blocks > draft.free:
        victim = draft.live.pop()
        draft.preempted.append(victim.id)
        draft.free += victim.num_private
        if len(draft.live) == index:
            return False
    return True


def _admit_waiting(draft: _Draft, waiting: Iterable[SeqView]) -> None:
    """Start waiting sequences in order while budget, seats and blocks last. A follower keeps its seat."""
    taken = {view.next_key for view in draft.live if view.next_key is not None and _behind(view) > 1}
    num_seats = draft.config.max_batch_size - len(draft.live)
    if draft.budget <= 0 or num_seats <= 0:
        return
    spare = len(draft.live)  # a block for each that runs: admitting into the last ones would only preempt again
    for view in waiting:
        num_seats -= 1
        if view.next_key is None or view.next_key not in taken:
            work = draft.draft(view, min(_behind(view), draft.budget))
            if work.num_blocks + view.idle_hit + spare > draft.free:
                return
            draft.promise(view, work)
            taken.add(view.next_key)
            spare += 1
        if draft.budget <= 0 or num_seats <= 0:
            return


def _behind(view: SeqView) -> int:
    """Tokens of a sequence whose K/V is still to be computed."""
    return view.num_tokens - view.num_computed
