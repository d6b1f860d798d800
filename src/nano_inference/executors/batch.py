"""What a step's rows ask of a forward pass: which tokens to keep, to draw after, to score and to pool.

Shapes: T tokens of the step (all rows one after another), K those of them that anything is asked of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from nano_inference.executors.step_input import ForwardInput, Span
from nano_inference.runner import Row

Rows = tuple[Row, ...]


def offsets(rows: Rows) -> list[int]:
    """Return which of the step's T tokens is each row's first."""
    return list(accumulate((len(row.tokens) for row in rows[:-1]), initial=0)) if rows else []


def previous_tokens(rows: Rows) -> list[int]:
    """Return the token before each of the step's T tokens, -1 at the start of a sequence."""
    found: list[int] = []
    for row in rows:
        found += (row.prev_token, *row.tokens[:-1])
    return found


def split_at_answers(rows: Rows) -> list[tuple[Rows, list[int]]]:
    """Split a step into the tokens of prompts and those of answers; computed in this order they are the whole step.

    Each part comes as rows, in step order, with which of the step's T tokens theirs are.
    """
    prompts: list[tuple[Row, int]] = []
    answers: list[tuple[Row, int]] = []
    for row, offset in zip(rows, offsets(rows), strict=True):
        size = min(max(0, row.num_prompt - row.start), len(row.tokens))
        if size:
            prompts.append((replace(row, tokens=row.tokens[:size]), offset))
        if size < len(row.tokens):
            previous = row.tokens[size - 1] if size else row.prev_token
            rest = replace(row, tokens=row.tokens[size:], start=row.start + size, prev_token=previous)
            answers.append((rest, offset + size))
    return [_part(prompts), _part(answers)]


def _part(found: list[tuple[Row, int]]) -> tuple[Rows, list[int]]:
    """Put rows that begin at these places of a step into step order."""
    ordered = sorted(found, key=lambda one: _step_order(one[0]))
    places = [place for row, offset in ordered for place in range(offset, offset + len(row.tokens))]
    return tuple(row for row, _ in ordered), places


def build(rows: Rows, block_size: int, device: torch.device) -> ForwardInput:
    """Concatenate the rows' tokens; return them with their positions and cache slots, as tensors."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    for row in rows:
        spans.append(Span(len(tokens), len(row.tokens), row.start, row.blocks))
        tokens += row.tokens
        places = range(row.start, row.start + len(row.tokens))
        positions += places
        slots += [row.blocks[p // block_size] * block_size + p % block_size for p in places]
    lists = [tokens, previous_tokens(rows), positions, slots]
    token_T, prev_T, position_T, slot_T = torch.tensor(lists, device=device)
    return ForwardInput(token_T=token_T, prev_T=prev_T, position_T=position_T, slot_T=slot_T, spans=tuple(spans))


def in_step_order(rows: Rows) -> Rows:
    """Put rows of one token first, shortest sequence first, so that those of about one length are neighbours."""
    return tuple(sorted(rows, key=_step_order))


def _step_order(row: Row) -> tuple[bool, int]:
    return len(row.tokens) > 1, row.start + len(row.tokens)


def drawn(rows: Rows) -> tuple[list[Row], list[int]]:
    """Return what to draw: rows as the sampler is to know them, and which of the T tokens each draw follows.

    A row draws once after its last token and once before each of its draft tokens, in order; each draw has the uniform
    of its own position, so that it is what a step that ends there would draw.
    """
    seen: list[Row] = []
    places: list[int] = []
    last = -1
    for row in rows:
        last += len(row.tokens)
        if not row.num_sampled:
            continue
        for left in range(row.num_drafts, 0, -1):
            seen.append(replace(row, tokens=row.tokens[:-left], num_drafts=0))
            places.append(last - left)
        seen.append(row)
        places.append(last)
    return seen, places


def pooled(rows: Rows) -> dict[int, range]:
    """Return, for the index of each row that pools its prompt, which of the T tokens' hidden states it adds up."""
    return {
        index: range(offset + row.pool_from - row.start, offset + len(row.tokens))
        for index, (row, offset) in enumerate(zip(rows, offsets(rows), strict=True))
        if row.pool_from is not None
    }


class Scored(NamedTuple):
    """The known tokens whose log-probabilities one row reports."""

    indices: range
    """Which of the step's T tokens they follow."""
    targets: tuple[int, ...]
    """The known tokens themselves."""


def scored(rows: Rows) -> dict[int, Scored]:
    """Return, for the index of each row that scores its prompt, what it reports."""
    found: dict[int, Scored] = {}
    for index, (row, offset) in enumerate(zip(rows, offsets(rows), strict=True)):
        if row.score_from is None:
            continue
        known = row.tokens[1:] if row.next_token < 0 else (*row.tokens[1:], row.next_token)
        known = known[: max(0, row.score_end - row.start - 1)]
        skip = max(0, row.score_from - row.start - 1)
        if skip < len(known):
            found[index] = Scored(range(offset + skip, offset + len(known)), known[skip:])
    return found


class Wanted(NamedTuple):
    """What the rows of a step that scores or pools ask for; places and indices count the K tokens that are kept."""

    kept: list[int]
    """Which of the step's T tokens anything is asked of, ascending."""
    places: list[int]
    """Which each draw follows, in the order of `drawn`."""
    scored: dict[int, Scored]
    pooled: dict[int, range]


def wanted(rows: Rows, places: list[int]) -> Wanted:
    """Return what the rows ask for besides the draws that follow `places`, and of which tokens."""
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
    """Return the places of consecutive tokens among those kept, where they are consecutive too."""
    return range(rank[indices[0]], rank[indices[-1]] + 1) if indices else indices
