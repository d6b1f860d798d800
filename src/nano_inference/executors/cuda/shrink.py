"""Computes a step in smaller parts if it is too large, or needs more memory than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from nano_inference.core.step import Row, RowResult, RowState
from nano_inference.executors.ahead import joined
from nano_inference.executors.batch import Rows

Run = Callable[[Rows], dict[int, RowResult]]


def run_in_parts(rows: Rows, run: Run, max_tokens: int) -> dict[int, RowResult]:
    """Run rows in parts of at most `max_tokens` tokens, in halves where memory runs out; join the results of a row."""
    found: dict[int, RowResult] = {}
    for part in parts_of(rows, max_tokens):
        for row_id, result in _run_halves(part, run).items():
            found[row_id] = merged(found[row_id], result) if row_id in found else result
    return found


def _run_halves(rows: Rows, run: Run) -> dict[int, RowResult]:
    """Run rows; after torch's out-of-memory error, run each half of them."""
    try:
        return run(rows)
    except torch.OutOfMemoryError:
        num_tokens = sum(len(row.tokens) for row in rows)
        if num_tokens < 2 or (len(rows) == 1 and rows[0].num_drafts):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return run_in_parts(rows, run, (num_tokens + 1) // 2)


def parts_of(rows: Rows, max_tokens: int) -> Iterator[Rows]:
    """Yield rows, divided where needed, in parts of at most `max_tokens` tokens; drafts stay with their row."""
    part: list[Row] = []
    size = 0
    for row in rows:
        for piece in _pieces(row, max_tokens):
            if part and size + len(piece.tokens) > max_tokens:
                yield tuple(part)
                part, size = [], 0
            part.append(piece)
            size += len(piece.tokens)
    if part:
        yield tuple(part)


def _pieces(row: Row, max_tokens: int) -> Iterator[Row]:
    while len(row.tokens) > max_tokens and not row.num_drafts:
        head, rest, end = row.tokens[:max_tokens], row.tokens[max_tokens:], row.start + max_tokens
        pool_from = row.pool_from if row.pool_from is not None and row.pool_from < end else None
        state, after = _states(row.state, end) if row.state else (None, None)
        yield row._replace(tokens=head, num_sampled=0, next_token=rest[0], pool_from=pool_from, state=state)
        pool_from = None if row.pool_from is None else max(row.pool_from, end)
        row = row._replace(tokens=rest, start=end, prev_token=head[-1], pool_from=pool_from, state=after)
    yield row


def _states(state: RowState, end: int) -> tuple[RowState, RowState]:
    """Divide what a row does with slots at a number of tokens."""
    saves = [tuple(save for save in state.saves if (save[0] <= end) == is_first) for is_first in (True, False)]
    return state._replace(saves=saves[0]), RowState(state.slot, state.slot, saves[1])


def merged(first: RowResult, second: RowResult) -> RowResult:
    """Return the result of a row whose pieces had these results."""
    pooled = second.pooled or first.pooled
    if first.pooled and second.pooled:
        pooled = tuple(a + b for a, b in zip(first.pooled, second.pooled, strict=True))
    return joined(first, second)._replace(
        scores=first.scores + second.scores,
        score_tops=first.score_tops + second.score_tops,
        score_ranks=first.score_ranks + second.score_ranks,
        pooled=pooled,
    )
