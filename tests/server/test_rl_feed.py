"""The queue between routes and the thread that gathers: whoever puts weights in is told whether they were taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference.server.rl.feed import Feed
from nano_inference.types import WeightError


def broken(closed: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        yield "b", 2
        raise ValueError("it cannot be read")
    finally:
        closed.append("broken")


def test_what_was_taken_is_told_and_what_was_not_is_cancelled() -> None:
    closed: list[str] = []

    async def work() -> None:
        feed = Feed()
        taken, failed, left = feed.put(iter([("a", 1)])), feed.put(broken(closed)), feed.put(iter([("c", 3)]))
        pairs: list[tuple[str, Any]] = []
        with pytest.raises(ValueError, match="cannot be read"):
            await asyncio.to_thread(lambda: pairs.extend(feed.pairs()))
        assert pairs == [("a", 1), ("b", 2)] and closed == ["broken"]
        assert taken.result() is None and failed.cancelled() and left.cancelled()

    asyncio.run(work())


def test_an_update_ends_or_is_given_up() -> None:
    async def work() -> None:
        whole, given_up = Feed(), Feed()
        futures = [whole.put(iter([("a", 1)])), given_up.put(iter([("a", 1)]))]
        whole.end()
        given_up.give_up("the trainer left")
        late = given_up.put(iter([("b", 2)]))
        assert await asyncio.to_thread(lambda: list(whole.pairs())) == [("a", 1)]
        with pytest.raises(WeightError, match="the trainer left"):
            await asyncio.to_thread(lambda: list(given_up.pairs()))
        assert [one.done() and not one.cancelled() for one in futures] == [True, True] and late.cancelled()

    asyncio.run(work())


def test_nobody_is_told_when_the_loop_has_gone() -> None:
    async def put() -> Feed:
        feed = Feed()
        feed.put(iter([("a", 1)]))
        feed.end()
        return feed

    assert list(asyncio.run(put()).pairs()) == [("a", 1)]
