"""Rows of a step as changes against the step before."""

from __future__ import annotations

import pickle
import random

from nano_inference.core.step import Row
from nano_inference.parallel.rows import SentRows
from nano_inference.types import SamplingParams
from tests.rows import make_row


def changed(row: Row, rng: random.Random) -> Row:
    """Return a row that has advanced, was preempted or is another request's with the same id."""
    start, tail = row.start + rng.randrange(3), tuple(range(rng.randrange(3)))
    blocks = (*row.blocks, *tail) if rng.random() < 0.7 else (rng.randrange(9),)
    row = row._replace(tokens=(rng.randrange(9),), start=start, blocks=blocks, history=(*row.history, *tail))
    if rng.random() < 0.2:
        row = row._replace(mask=None if row.mask else b"\3", history=(), params=SamplingParams(top_k=rng.randrange(9)))
    return row


def test_every_rank_reads_the_rows_that_rank_0_writes() -> None:
    rng = random.Random(0)
    sender, receiver = SentRows(), SentRows()
    rows = [make_row(number, blocks=(number,)) for number in range(9)]
    for _ in range(200):
        rows = [changed(row, rng) for row in rows]
        step = tuple(rng.sample(rows, rng.randrange(10)))
        assert receiver.read(pickle.loads(pickle.dumps(sender.write(step)))) == step


def test_a_running_row_costs_some_bytes() -> None:
    """Not its parameters, and neither its blocks nor its history."""
    sent = SentRows()
    row = make_row(0, blocks=tuple(range(500)), history=tuple(range(8000)), num_prompt=8000)
    sent.write([row])
    row = row._replace(tokens=(7,), start=row.start + 1, blocks=(*row.blocks, 9), history=(*row.history, 7))
    assert len(pickle.dumps(sent.write([row]))) < 100
