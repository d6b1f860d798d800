"""Plans a window before the one that runs is committed: its rows continue those of the running step, as if none ended.

The K/V that a row writes after its end is behind everything that was published, so its blocks can be released at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nano_inference.config import SchedulerConfig
from nano_inference.core.scheduler import STREAM_LOOKAHEAD
from nano_inference.core.sequence import Sequence
from nano_inference.core.step import UNREAD, Row


def is_current(seq: Sequence, row: Row) -> bool:
    """Return whether a row is still the sequence's next one: it neither ended nor was preempted or got a mask."""
    is_open = seq.finish_reason is None and bool(seq.blocks) and seq.token_mask is None
    return is_open and seq.num_computed == row.start


def must_wait(seq: Sequence, row: Row) -> bool:
    """Return whether the host must read this row's tokens before others can be sampled, or has results to store."""
    return (
        seq.token_mask is not None
        or seq.request.program is not None
        or seq.has_penalties
        or bool(row.banned)
        or seq.num_new + row.num_sampled < seq.request.params.min_tokens
        or row.num_drafts > 0
        or row.score_from is not None
        or row.pool_from is not None
        or row.state is not None
    )


def is_window(rows: Seq[Row], num_running: int) -> bool:
    """Return whether a step computes one token of every running sequence and samples after it."""
    return len(rows) == num_running and all(len(row.tokens) == 1 and row.num_sampled for row in rows)


def num_ahead(seqs: Seq[Sequence], rows: Seq[Row], config: SchedulerConfig) -> list[int]:
    """Return how many tokens each row samples in the next window; 0 if it reaches its length in this one."""
    is_streaming = any(seq.request.is_streamed for seq in seqs)
    most = min(config.lookahead, STREAM_LOOKAHEAD) if is_streaming else config.lookahead
    return [max(0, min(most, seq.max_new - row.num_sampled)) for seq, row in zip(seqs, rows, strict=True)]


def num_missing(seq: Sequence, row: Row, count: int, block_size: int) -> int:
    """Return how many blocks a row lacks for `count` tokens after its own."""
    return max(0, -(-(row.start + row.num_sampled + count) // block_size) - len(seq.blocks)) if count else 0


def row_after(seq: Sequence, row: Row, count: int) -> Row:
    """Return the row of the next window, which reads its first token on the device."""
    start = row.start + row.num_sampled
    return row._replace(
        tokens=(UNREAD,), prev_token=UNREAD, start=start, blocks=tuple(seq.blocks), num_sampled=count, next_token=-1
    )
