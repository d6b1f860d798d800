"""`Feed`: futures of the sources, end, abort, and a closed event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference.server.trainers.updates import Feed
from nano_inference.types import WeightError


def broken(closed: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        yield "b", 2
        raise ValueError("it cannot be read")
    finally:
        closed.append("broken")


def test_future_is_true_for_consumed_source_and_false_for_others() -> None:
    closed: list[str] = []

    async def work() -> None:
        feed = Feed()
        consumed, failed, left = feed.put(iter([("a", 1)])), feed.put(broken(closed)), feed.put(iter([("c", 3)]))
        pairs: list[tuple[str, Any]] = []
        with pytest.raises(ValueError, match="cannot be read"):
            await asyncio.to_thread(lambda: pairs.extend(feed.pairs()))
        assert pairs == [("a", 1), ("b", 2)] and closed == ["broken"]
        assert [await one for one in (consumed, failed, left)] == [True, False, False]

    asyncio.run(work())


def test_end_stops_pairs_and_abort_raises() -> None:
    async def work() -> None:
        whole, aborted = Feed(), Feed()
        futures = [whole.put(iter([("a", 1)])), aborted.put(iter([("a", 1)]))]
        whole.end()
        aborted.abort("the trainer left")
        late = aborted.put(iter([("b", 2)]))
        assert await asyncio.to_thread(lambda: list(whole.pairs())) == [("a", 1)]
        with pytest.raises(WeightError, match="the trainer left"):
            await asyncio.to_thread(lambda: list(aborted.pairs()))
        assert [await one for one in (*futures, late)] == [True, True, False]

    asyncio.run(work())


def test_pairs_after_the_event_loop_is_closed() -> None:
    async def put() -> Feed:
        feed = Feed()
        feed.put(iter([("a", 1)]))
        feed.end()
        return feed

    assert list(asyncio.run(put()).pairs()) == [("a", 1)]
