"""`Group`: messages shorter and longer than the first broadcast, and what they may contain."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from nano_inference.core.step import BlockCopy, Row
from nano_inference.executors.protocol import CacheSize
from nano_inference.loading.pieces import FileRange
from nano_inference.parallel.links import _FIRST_BYTES, Announced, Links
from nano_inference.types import SamplingParams
from tests.parallel.ranks import on_ranks
from tests.pickles import Runs

SIZES = (0, 1, *range(_FIRST_BYTES - 64, _FIRST_BYTES + 8), 3 * _FIRST_BYTES)


def test_messages_of_any_length_arrive() -> None:
    messages = [("run", size, b"\7" * size) for size in SIZES]

    def work(links: Links) -> list[tuple[Any, ...]]:
        if links.rank:
            return [links.commands.next_message() for _ in messages]
        for message in messages:
            links.commands.broadcast(*message)
        return messages

    assert all(found == messages for found in on_ranks(3, work))


PARAMS = SamplingParams(seed=3, stop=("a",), stop_token_ids=(7,), allowed_token_ids=(1, 2), logit_bias={5: -1.5})
ROW = Row(
    1, (2, 3), -1, 0, (0,), 1, PARAMS, "processed", 3, 0, mask=b"\7", score_params=PARAMS, stop_ids=frozenset({7})
)
FILE = FileRange(Path("a/b"), 8, (2, 3), "F32")


def received(message: tuple[Any, ...]) -> tuple[Any, ...]:
    def work(links: Links) -> tuple[Any, ...]:
        if links.rank:
            return links.commands.next_message()
        links.commands.broadcast(*message)
        return message

    return on_ranks(2, work)[1]


def test_records_of_commands_arrive() -> None:
    message = (
        "run",
        0,
        (ROW,),
        (BlockCopy(1, 2, 3),),
        CacheSize(num_blocks=4, block_size=16),
        Announced("w", "F32", FILE),
        {"a": [1.5, None]},
    )
    assert received(message) == message


@pytest.mark.parametrize(
    ("call", "name"),
    [(Runs(os.getcwd), "posix.getcwd"), (Runs(getattr, SamplingParams, "from_dict"), "builtins.getattr")],
)
def test_message_that_names_another_function_is_refused(call: Runs, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=name):
        received((call,))
