"""Index computations for a step's rows: which tokens' outputs are sampled from, scored and pooled.

Shapes: T tokens of the step (rows concatenated), K kept tokens (those whose hidden states are needed).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch

from nano_inference.core.step import Row
from nano_inference.executors.step_input import ForwardInput, Span

Rows = tuple[Row, ...]


def offsets(rows: Rows) -> list[int]:
    """Return the index, among the step's T tokens, of each row's first token."""
    return list(accumulate((len(row.tokens) for row in rows[:-1]), initial=0)) if rows else []


def previous_tokens(rows: Rows) -> list[int]:
    """Return the token before each of the step's T tokens, -1 at the start of a sequence."""
    found: list[int] = []
    for row in rows:
        found += (row.prev_token, *row.tokens[:-1])
    return found


def adapter_numbers(rows: Rows) -> list[int]:
    """Return the number of the adapter of each of the step's T tokens, 0 for none."""
    return [row.adapter for row in rows for _ in row.tokens]


def split_at_answers(rows: Rows) -> list[tuple[Rows, list[int]]]:
    """Split a step into prompt tokens and generated tokens, which must be computed in this order.

    Each part is (rows in step order, the index of each of its tokens among the step's T tokens).
    """
    prompts: list[tuple[Row, int]] = []
    answers: list[tuple[Row, int]] = []
    for row, offset in zip(rows, offsets(rows), strict=True):
        size = min(max(0, row.num_prompt - row.start), len(row.tokens))
        if size:
            prompts.append((row._replace(tokens=row.tokens[:size]), offset))
        if size < len(row.tokens):
            previous = row.tokens[size - 1] if size else row.prev_token
            rest = row._replace(tokens=row.tokens[size:], start=row.start + size, prev_token=previous)
            answers.append((rest, offset + size))
    return [_part(prompts), _part(answers)]


def _part(found: list[tuple[Row, int]]) -> tuple[Rows, list[int]]:
    """Sort (row, index of its first token) pairs into step order; return the rows and the indices of all tokens."""
    ordered = sorted(found, key=lambda one: _step_order(one[0]))
    places = [place for row, offset in ordered for place in range(offset, offset + len(row.tokens))]
    return tuple(row for row, _ in ordered), places


def spans_of(rows: Rows) -> list[Span]:
    """Return the rows as spans of the step's T tokens."""
    pairs = zip(rows, offsets(rows), strict=True)
    return [Span(offset, len(row.tokens), row.start, row.blocks, row.state) for row, offset in pairs]


def build(rows: Rows, block_size: int, device: torch.device) -> ForwardInput:
    """Concatenate the rows' tokens; return them with positions and cache slots as int64 tensors."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for row in rows:
        tokens += row.tokens
        places = range(row.start, row.start + len(row.tokens))
        positions += places
        slots += [row.blocks[p // block_size] * block_size + p % block_size for p in places]
    lists = [tokens, previous_tokens(rows), positions, slots]
    token_T, prev_T, position_T, slot_T = torch.tensor(lists, device=device)
    return ForwardInput(
        token_T=token_T, prev_T=prev_T, position_T=position_T, slot_T=slot_T, spans=tuple(spans_of(rows))
    )


def in_step_order(rows: Rows) -> Rows:
    """Sort rows of one token first, by sequence length, so that rows of similar length are adjacent."""
    return tuple(sorted(rows, key=_step_order))


def _step_order(row: Row) -> tuple[bool, int]:
    return len(row.tokens) > 1, row.start + len(row.tokens)


def drawn(rows: Rows) -> tuple[list[Row], list[int]]:
    """Return one row per draw, for the sampler, and the index among the T tokens that each draw follows.

    A row draws before each of its draft tokens and after its last token. Each draw uses the random number of its own
    position, so it equals the draw of a step that ends there.
    """
    seen: list[Row] = []
    places: list[int] = []
    last = -1
    for row in rows:
        last += len(row.tokens)
        if not row.num_sampled:
            continue
        for left in range(row.num_drafts, 0, -1):
            seen.append(row._replace(tokens=row.tokens[:-left], num_drafts=0))
            places.append(last - left)
        seen.append(row)
        places.append(last)
    return seen, places


def pooled(rows: Rows) -> dict[int, range]:
    """Map the index of each row that pools its prompt to the T-token range whose hidden states are summed."""
    return {
        index: range(offset + row.pool_from - row.start, offset + len(row.tokens))
        for index, (row, offset) in enumerate(zip(rows, offsets(rows), strict=True))
        if row.pool_from is not None
    }


class Scored(NamedTuple):
    """The known tokens whose log-probabilities one row reports."""

    first: int  # position of the first target
    indices: range  # tokens of the step that precede the targets
    targets: tuple[int, ...]


def scored(rows: Rows) -> dict[int, Scored]:
    """Map the index of each row that scores its prompt to its targets."""
    found: dict[int, Scored] = {}
    for index, (row, offset) in enumerate(zip(rows, offsets(rows), strict=True)):
        if row.score_from is None:
            continue
        known = row.tokens[1:] if row.next_token < 0 else (*row.tokens[1:], row.next_token)
        known = known[: max(0, row.score_end - row.start - 1)]
        skip = max(0, row.score_from - row.start - 1)
        if skip < len(known):
            found[index] = Scored(row.start + skip + 1, range(offset + skip, offset + len(known)), known[skip:])
    return found


class Wanted(NamedTuple):
    """The outputs that a step's rows need; all fields but `kept` hold indices among the K kept tokens."""

    kept: list[int]  # indices among the T tokens, ascending
    places: list[int]  # the token that each draw follows, in the order of `drawn`
    scored: dict[int, Scored]
    pooled: dict[int, range]


def wanted(rows: Rows, places: list[int]) -> Wanted:
    """Return the tokens to keep for scoring, for pooling and for draws that follow the tokens `places`."""
    known, summed = scored(rows), pooled(rows)
    kept = sorted({*places}.union(*(one.indices for one in known.values()), *summed.values()))
    rank = {place: index for index, place in enumerate(kept)}
    return Wanted(
        kept,
        [rank[place] for place in places],
        {row: one._replace(indices=_ranks(one.indices, rank)) for row, one in known.items()},
        {row: _ranks(indices, rank) for row, indices in summed.items()},
    )


def _ranks(indices: range, rank: Mapping[int, int]) -> range:
    """Convert a range of the T tokens, all kept, to a range of the K kept tokens."""
    return range(rank[indices[0]], rank[indices[-1]] + 1) if indices else indices
