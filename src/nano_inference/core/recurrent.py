"""Slots of recurrent states along a sequence's steps. The core calls this only if the cache has slots.

Between steps a running sequence holds one slot, the state after its `num_computed` tokens. A row with draft tokens
writes a second slot: the first one receives the state before the drafts, and is used if any of them is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from nano_inference.core.cache import Hit, KVManager, Salt, StatePool
from nano_inference.core.scheduler import Work
from nano_inference.core.sequence import Sequence
from nano_inference.core.step import Row, RowResult, RowState

SLOTS_PER_SEQUENCE = 2
"""A running sequence's slot, and one for its draft tokens or for a snapshot that another one starts from."""
_MIN_REACH = 8  # fewest tokens that a snapshot where prompts diverge saves
_MIN_SHARED = 64  # fewest tokens to save for which a sequence waits for a snapshot
_ENDING = 8  # tokens at a prompt's end that the next turn may lack: those that begin an answer, and a thought
_STEP = 256  # tokens of a prompt after which a spare snapshot is kept, and after twice as many each time


def take_slots(states: StatePool, seqs: Seq[Sequence], work: Seq[Work], hits: Mapping[int, Hit]) -> None:
    """Set the slots of a step's rows: first those that rows need, then those for snapshots while there are any.

    Called before blocks are taken, which may drop snapshots that the step reads.
    """
    for seq, one in zip(seqs, work, strict=True):
        if seq.state is None:
            hit = hits[seq.id]
            seq.snapshots_at, seq.reach = _snapshots_of(seq, hit.reach), hit.reach
            seq.state = RowState(_take(states), hit.state)
        elif one.num_drafts:
            slot = seq.state.slot
            seq.state = RowState(_take(states), slot, ((len(seq.tokens), slot),))
    for seq, one in zip(seqs, work, strict=True):
        if seq.snapshots_at and seq.snapshots_at[0] <= seq.num_computed + one.num_tokens:
            _plan_snapshots(states, seq, seq.num_computed + one.num_tokens)
    states.unpin()


def settle_state(states: StatePool, seq: Sequence, row: Row, result: RowResult) -> int:
    """Keep the slot that holds a state of the sequence after a step; return the number of its tokens.

    After a rejected draft token, tokens are left to compute. The state of a sequence that ended may be behind or ahead.
    """
    assert row.state is not None
    slot, position = row.state.slot, row.start + len(row.tokens) + max(0, len(result.tokens) - row.num_drafts - 1)
    if row.num_drafts:
        unused = row.state.source
        if seq.num_computed < position:
            slot, unused, position = unused, slot, position - row.num_drafts
        states.release(unused)
    seq.state = RowState(slot, slot)
    if seq.finish_reason is None:
        assert position == seq.num_computed or row.num_drafts, "the state is ahead of the sequence"
        seq.num_computed = position
    return position


def keep_states(kv: KVManager, seq: Sequence, row: Row, position: int, salt: Salt | None) -> None:
    """Keep the snapshots of a row, and the state of a sequence that ended, if their K/V is found under a salt."""
    assert seq.state is not None and row.state is not None
    for count, slot in row.state.saves if keeps_snapshots(row) else ():
        _keep(kv, seq, slot, count, salt, is_spare=_is_spare(seq, count))
    if seq.finish_reason is not None:
        _keep(kv, seq, seq.state.slot, position, salt if position <= seq.num_computed else None)
        seq.state = None


def release_state(kv: KVManager, seq: Sequence, salt: Salt | None) -> None:
    """Release a sequence's slots. With a salt, no step has been planned: its state becomes a snapshot."""
    if seq.state is None:
        return
    if salt is not None:
        _keep(kv, seq, seq.state.slot, seq.num_computed, salt)
    else:
        for slot in {seq.state.slot, *(slot for _, slot in seq.state.saves)}:
            kv.states.release(slot)
    seq.state = None


def is_shared(num_computed: int, reach: int) -> bool:
    """Return whether other sequences should wait for the snapshot where a prefix of cached K/V ends."""
    return reach - num_computed >= _MIN_SHARED


def keeps_snapshots(row: Row) -> bool:
    """Return whether the states that a row saves become snapshots."""
    return row.state is not None and bool(row.state.saves) and not row.num_drafts


def starts_from_snapshot(row: Row) -> bool:
    """Return whether a row reads a snapshot."""
    return row.state is not None and row.start > 0 and not row.num_drafts and row.state.source != row.state.slot


def _take(states: StatePool) -> int:
    slot = states.take()
    assert slot is not None, "the number of running sequences is limited by that of the slots"
    return slot


def _keep(kv: KVManager, seq: Sequence, slot: int, position: int, salt: Salt | None, *, is_spare: bool = False) -> None:
    if salt is None:
        kv.states.release(slot)
    else:
        is_end = position > seq.num_prompt
        kv.keep_state(slot, seq.tokens, salt, seq.blocks, position, is_spare=is_spare, is_end=is_end)


def _snapshots_of(seq: Sequence, reach: int) -> tuple[int, ...]:
    """Return after how many tokens a sequence that starts keeps snapshots, ascending.

    Before the prompt's last token, where samples diverge, and shortly before, where conversations do whose thoughts
    are dropped; where its prefix in the cache ends, because others may share it; at powers of 2 within a long prompt.
    """
    start, last = seq.num_computed, seq.num_prompt - 1
    found = {last, seq.num_prompt - _ENDING} if last >= 8 * _ENDING else {last}
    if reach >= start + _MIN_REACH:
        found.add(reach)
    count = _STEP
    while count < last:
        found.add(count)
        count *= 2
    return tuple(sorted(count for count in found if count > start))


def _plan_snapshots(states: StatePool, seq: Sequence, end: int) -> None:
    """Take slots for the snapshots up to `end`; those without a slot are not kept."""
    assert seq.state is not None
    due = [count for count in seq.snapshots_at if count <= end]
    seq.snapshots_at = seq.snapshots_at[len(due) :]
    saves = []
    for count in reversed(due):
        if (slot := states.take()) is not None:
            saves.append((count, slot))
    seq.state = seq.state._replace(saves=tuple(reversed(saves)))


def _is_spare(seq: Sequence, count: int) -> bool:
    """Return whether other snapshots are worth more: those after 256, 512, 1024 … tokens, and a near one for others."""
    if count == seq.num_prompt - 1:
        return seq.request.num_samples == 1 and count >= 8 * _ENDING
    return count % _STEP == 0 and (count // _STEP).bit_count() == 1
