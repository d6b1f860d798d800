"""Undoes an interrupted step: restores sequences to their state before it.

Every function can be interrupted at any point and called again: it only truncates lists and assigns.
"""

from __future__ import annotations

from typing import NamedTuple

from nano_inference.matching import advance_matcher, mask_of
from nano_inference.sequence import Sequence


class Checkpoint(NamedTuple):
    """One sequence before a step changes it: the lengths of its columns, and the values that a step replaces."""

    seq: Sequence
    num_tokens: int
    num_scores: int
    pooled: list[float]
    num_pooled: int
    program_state: object


def checkpoint(seq: Sequence) -> Checkpoint:
    """Return the state that `roll_back` restores."""
    return Checkpoint(seq, len(seq.tokens), len(seq.scores), seq.pooled, seq.num_pooled, seq.program_state)


def roll_back(saved: Checkpoint) -> None:
    """Remove what a step added to a sequence. Its matcher cannot go back, and is dropped (see `rebuild_matcher`)."""
    seq = saved.seq
    del seq.tokens[saved.num_tokens :]
    num_new = saved.num_tokens - seq.num_prompt
    for column in (seq.mask, seq.logprobs, seq.versions, seq.top_logprobs, seq.raw_logprobs, seq.sampling_masks):
        del column[num_new:]
    for column in (seq.scores, seq.score_tops, seq.score_ranks):
        del column[saved.num_scores :]
    seq.pooled, seq.num_pooled, seq.program_state = saved.pooled, saved.num_pooled, saved.program_state
    seq.matcher = None


def restart(seq: Sequence) -> None:
    """Drop a live sequence's block table without releasing it; its K/V is computed again."""
    seq.blocks = []
    seq.num_computed = seq.num_published = 0
    seq.finish_reason = seq.stop_reason = None
    if seq.must_restart:
        clear_prompt_results(seq)


def clear_prompt_results(seq: Sequence) -> None:
    """Delete the prompt's scores and pooled hidden states, which are then computed again from the start."""
    seq.scores.clear()
    seq.score_tops.clear()
    seq.score_ranks.clear()
    seq.pooled.clear()
    seq.num_pooled = 0


def rebuild_matcher(seq: Sequence) -> None:
    """Replace a dropped matcher by a new one that received the sequence's tokens. Raises what the matcher raises."""
    if seq.request.make_matcher is None or seq.matcher is not None:
        return
    matcher = seq.request.make_matcher()
    for token in seq.tokens[seq.num_prompt :]:
        advance_matcher(matcher, token)
    seq.token_mask = mask_of(matcher)
    seq.matcher = matcher  # last: an interrupted call leaves None, and is repeated
