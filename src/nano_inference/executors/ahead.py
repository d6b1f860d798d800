"""Lookahead for any executor: repeats a forward pass with the tokens just sampled. The reference for captured ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from nano_inference.core.step import DrawExtras, Row, RowResult
from nano_inference.types import TopLogprobs


def sample_ahead(rows: tuple[Row, ...], run: Callable[[tuple[Row, ...]], dict[int, RowResult]]) -> dict[int, RowResult]:
    """Return the results of `run`, called again for rows with `num_sampled` above 1, which read their latest token."""
    found = latest = run(rows)
    while rows := _continued(rows, latest):
        latest = run(rows)
        found |= {row.id: joined(found[row.id], latest[row.id]) for row in rows}
    return found


def _continued(rows: tuple[Row, ...], results: Mapping[int, RowResult]) -> tuple[Row, ...]:
    """Return the rows that sample another token in this step, each with the token that it sampled last to compute.

    A row ends at a stop token, and at a log-probability that is not finite.
    """
    return tuple(
        row._replace(
            tokens=result.tokens,
            prev_token=row.tokens[-1],
            start=row.start + len(row.tokens),
            num_sampled=row.num_sampled - 1,
            score_from=None,
            pool_from=None,
            next_token=-1,
            state=row.state and row.state._replace(source=row.state.slot, saves=()),
        )
        for row in rows
        if row.num_sampled > 1
        and (result := results[row.id]).tokens[0] not in row.stop_ids
        and math.isfinite(result.logprobs[0])
    )


def joined(first: RowResult, second: RowResult) -> RowResult:
    """Concatenate the draws of two results of one row."""
    num_first, num_second = len(first.tokens), len(second.tokens)
    tops: tuple[TopLogprobs, ...] = ()
    if first.top_logprobs or second.top_logprobs:
        tops = (first.top_logprobs or ((),) * num_first) + (second.top_logprobs or ((),) * num_second)
    extras: tuple[DrawExtras, ...] = ()
    if first.extras or second.extras:
        extras = (first.extras or (DrawExtras(),) * num_first) + (second.extras or (DrawExtras(),) * num_second)
    return first._replace(
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        top_logprobs=tops,
        extras=extras,
    )
