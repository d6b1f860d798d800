"""`Group`: messages shorter and longer than the first broadcast."""

from __future__ import annotations

from typing import Any

from nano_inference.parallel.links import _FIRST_BYTES, Links
from tests.parallel.ranks import on_ranks

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
