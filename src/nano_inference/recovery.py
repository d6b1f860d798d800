"""What an interrupted step leaves of a sequence, and how it is brought back to the end of the step before.

Every function here can be interrupted at any point and called again: it only cuts columns to a length and assigns.
"""

from __future__ import annotations

from typing import NamedTuple

from nano_inference.sequence import Sequence, forget_found


class Checkpoint(NamedTuple):
    """One sequence before a step adds to it: how long its columns are, and what a step replaces."""

    seq: Sequence
    num_tokens: int
    num_scores: int
    pooled: list[float]
    num_pooled: int
    program_state: object


def checkpoint(seq: Sequence) -> Checkpoint:
    """Return what `roll_back` needs of a sequence."""
    return Checkpoint(seq, len(seq.tokens), len(seq.scores), seq.pooled, seq.num_pooled, seq.program_state)


def roll_back(mark: Checkpoint) -> None:
    """Take back what a step added to a sequence. Its matcher, which cannot forget a token, is dropped."""
    seq = mark.seq
    del seq.tokens[mark.num_tokens :]
    num_new = mark.num_tokens - seq.num_prompt
    for column in (seq.mask, seq.logprobs, seq.versions, seq.top_logprobs, seq.raw_logprobs, seq.sampling_masks):
        del column[num_new:]
    for column in (seq.scores, seq.score_tops, seq.score_ranks):
        del column[mark.num_scores :]
    seq.pooled, seq.num_pooled, seq.program_state = mark.pooled, mark.num_pooled, mark.program_state
    seq.matcher = None


def restart(seq: Sequence) -> None:
    """Take a live sequence's blocks away without giving them back: it computes its K/V again.

    A prompt that is still being scored or pooled starts again, so that all of it is of one weight version.
    """
    seq.blocks = []
    seq.num_computed = seq.num_published = 0
    seq.finish_reason = seq.stop_reason = None
    if seq.next_score is not None or seq.request.params.pooling is not None:
        forget_found(seq)
