"""What a step's rows ask for, as places among the hidden states that are kept."""

from __future__ import annotations

from nano_inference.core.step import Row
from nano_inference.executors.batch import Scored, Wanted, drawn, wanted
from tests.rows import make_row


def row(number: int, num_tokens: int, **asks: int) -> Row:
    """A row of tokens 0, 1, ... that starts at position 0."""
    return make_row(number, tuple(range(num_tokens)), blocks=(number,), **asks)


def asked(*rows: Row) -> Wanted:
    return wanted(rows, drawn(rows)[1])


def test_chunk_without_sampling_keeps_no_position() -> None:
    assert asked(row(0, 5), row(1, 3)) == ([], [], {}, {})


def test_sampling_chunk_keeps_only_its_last_position() -> None:
    rows = (row(0, 1, num_sampled=1), row(1, 5), row(2, 4, num_sampled=1))
    assert drawn(rows) == ([rows[0], rows[2]], [0, 9])
    assert asked(*rows) == ([0, 9], [0, 1], {}, {})


def test_draft_positions_are_kept_with_the_token_before_them() -> None:
    rows = (row(0, 1, num_sampled=1), row(1, 6, num_sampled=3, num_drafts=2))
    seen, places = drawn(rows)
    assert places == [0, 4, 5, 6]
    assert [one.tokens for one in seen] == [(0,), *(tuple(range(size)) for size in (4, 5, 6))]
    assert asked(*rows) == ([0, 4, 5, 6], [0, 1, 2, 3], {}, {})


def test_scored_and_sampled_positions_can_be_apart() -> None:
    rows = (row(0, 8, num_sampled=1, score_from=0, score_end=4), row(1, 6, pool_from=2), row(2, 2, num_sampled=1))
    found = asked(*rows)
    assert found.kept == [0, 1, 2, 7, 10, 11, 12, 13, 15]
    assert found.scored == {0: Scored(1, range(3), (1, 2, 3))} and found.pooled == {1: range(4, 8)}
    assert found.places == [3, 8]
