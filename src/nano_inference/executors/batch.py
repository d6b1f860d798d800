"""A scheduled batch -> the input of a forward pass, as lists for the kernels, as tensors for torch.

Shapes: T tokens of the step (all rows one after another).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch

from nano_inference.executors.step_input import ForwardInput, Laid, Span
from nano_inference.types import Row


def lay(rows: tuple[Row, ...]) -> Laid:
    """Lay the rows' tokens one after another. The rows come as `in_step_order` puts them."""
    tokens: list[int] = []
    previous: list[int] = []
    spans: list[Span] = []
    for row in rows:
        spans.append(Span(len(tokens), len(row.tokens), row.start, row.blocks))
        tokens += row.tokens
        previous += (row.prev_token, *row.tokens[:-1])
    return Laid(tokens, previous, tuple(spans))


class Part(NamedTuple):
    """Some of a step's tokens, laid like a step of their own."""

    laid: Laid
    places: tuple[int, ...]
    """Where each of its tokens is among the step's T."""


def split_at_answers(rows: tuple[Row, ...], laid: Laid) -> tuple[Part, Part]:
    """Split a step into the tokens of prompts and those of answers; computed in this order they are the whole step."""
    prompts: list[tuple[Row, int]] = []
    answers: list[tuple[Row, int]] = []
    for row, span in zip(rows, laid.spans, strict=True):
        size = min(max(0, row.num_prompt - row.start), len(row.tokens))
        if size:
            prompts.append((replace(row, tokens=row.tokens[:size]), span.offset))
        if size < len(row.tokens):
            previous = row.tokens[size - 1] if size else row.prev_token
            rest = replace(row, tokens=row.tokens[size:], start=row.start + size, prev_token=previous)
            answers.append((rest, span.offset + size))
    return _part(prompts), _part(answers)


def _part(found: list[tuple[Row, int]]) -> Part:
    """Lay rows that begin at these places of a step."""
    ordered = sorted(found, key=lambda one: _step_order(one[0]))
    places = [range(offset, offset + len(row.tokens)) for row, offset in ordered]
    return Part(lay(tuple(row for row, _ in ordered)), tuple(chain.from_iterable(places)))


def build(rows: tuple[Row, ...], block_size: int, device: torch.device) -> ForwardInput:
    """Concatenate the rows' tokens; return them with their positions and cache slots, as tensors."""
    return as_tensors(lay(rows), block_size, device)


def as_tensors(laid: Laid, block_size: int, device: torch.device) -> ForwardInput:
    """Return a step's tokens with their positions and cache slots, as tensors."""
    positions: list[int] = []
    slots: list[int] = []
    for span in laid.spans:
        places = range(span.start, span.end)
        positions += places
        slots += [span.blocks[p // block_size] * block_size + p % block_size for p in places]
    lists = [laid.tokens, laid.previous, positions, slots]
    token_T, prev_T, position_T, slot_T = torch.tensor(lists, device=device)
    return ForwardInput(token_T=token_T, prev_T=prev_T, position_T=position_T, slot_T=slot_T, spans=laid.spans)


def in_step_order(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Put rows of one token first, shortest sequence first, so that those of about one length are neighbours."""
    return tuple(sorted(rows, key=_step_order))


def _step_order(row: Row) -> tuple[bool, int]:
    return len(row.tokens) > 1, row.start + len(row.tokens)


class Sampled(NamedTuple):
    """One token to draw."""

    row: int
    place: int
    """Which of the step's T tokens it follows."""
    seen: Row
    """The row as far as that token: what the sampler is to know."""


def sampled(rows: tuple[Row, ...], spans: tuple[Span, ...]) -> list[Sampled]:
    """Return the tokens to draw, those of one row together: one after its last token, one before each of its guesses.

    Each has the uniform of its own position, so that it is what a step that ends there would draw.
    """
    found: list[Sampled] = []
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
        if not row.num_sampled:
            continue
        last = span.offset + span.num_tokens - 1
        for left in range(row.num_drafts, 0, -1):
            found.append(Sampled(index, last - left, replace(row, tokens=row.tokens[:-left], num_drafts=0)))
        found.append(Sampled(index, last, row))
    return found


class Pooled(NamedTuple):
    """The positions whose hidden states one row adds up."""

    row: int
    indices: range
    """Which of the step's T tokens they are."""


def pooled(rows: tuple[Row, ...], spans: tuple[Span, ...]) -> list[Pooled]:
    """Return what the rows that pool a prompt add up."""
    return [
        Pooled(index, range(span.offset + row.pool_from - row.start, span.offset + span.num_tokens))
        for index, (row, span) in enumerate(zip(rows, spans, strict=True))
        if row.pool_from is not None
    ]


class Scored(NamedTuple):
    """The known tokens whose log-probabilities one row reports."""

    row: int
    indices: range
    """Which of the step's T tokens they follow."""
    targets: tuple[int, ...]
    """The known tokens themselves."""


def scored(rows: tuple[Row, ...], spans: tuple[Span, ...]) -> list[Scored]:
    """Return what the rows that score a prompt report."""
    found = []
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
        if row.score_from is None:
            continue
        known = row.tokens[1:] if row.next_token < 0 else (*row.tokens[1:], row.next_token)
        known = known[: max(0, row.score_end - row.start - 1)]
        skip = max(0, row.score_from - row.start - 1)
        if skip < len(known):
            found.append(Scored(index, range(span.offset + skip, span.offset + len(known)), known[skip:]))
    return found


class Wanted(NamedTuple):
    """What a step's rows ask for; places and indices count the hidden states that are kept."""

    kept: list[int]
    """Which of the step's T tokens anything is asked of, ascending."""
    sampled: list[Sampled]
    scored: list[Scored]
    pooled: list[Pooled]


def wanted(rows: tuple[Row, ...], spans: tuple[Span, ...]) -> Wanted:
    """Return what the rows ask for, and of which tokens: often only of the last of each chunk."""
    drawn, known, summed = sampled(rows, spans), scored(rows, spans), pooled(rows, spans)
    ranges = [*(one.indices for one in known), *(one.indices for one in summed)]
    kept = sorted({one.place for one in drawn}.union(*ranges))
    rank = {place: index for index, place in enumerate(kept)}
    return Wanted(
        kept,
        [one._replace(place=rank[one.place]) for one in drawn],
        [one._replace(indices=_ranks(one.indices, rank)) for one in known],
        [one._replace(indices=_ranks(one.indices, rank)) for one in summed],
    )


def _ranks(indices: range, rank: Mapping[int, int]) -> range:
    """Return the places of consecutive tokens among those kept, where they are consecutive too."""
    return range(rank[indices[0]], rank[indices[-1]] + 1) if indices else indices
