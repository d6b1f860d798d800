"""Unread deltas of a client: complete, in order, in bounded memory."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections import defaultdict
from typing import Any

import pytest

from nano_inference.core.outbox import MAX_MERGED, MAX_SINGLE, Outbox
from nano_inference.types import Delta, EngineRequest, SamplingParams, TokenLogprob, TrainingSample

ENDED: Any = object.__new__(TrainingSample)


def delta(sample: int, tokens: list[int], *, tops: bool = False, ends: bool = False) -> Delta:
    return Delta(
        request_id=7,
        sample_index=sample,
        token_ids=tuple(tokens),
        logprobs=tuple(-token / 8 for token in tokens),
        mask=tuple(token % 2 for token in tokens),
        versions=tuple(token % 3 for token in tokens),
        top_logprobs=tuple((TokenLogprob(token, -1.0),) for token in tokens) if tops else None,
        sample=ENDED if ends else None,
    )


def opened(*sizes: int) -> Outbox:
    """Return the outbox of requests with these numbers of samples."""
    params = SamplingParams()
    return Outbox([EngineRequest(prompt=(1,), params=params, num_samples=size) for size in sizes])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("tops", [False, True])
def test_all_deltas_are_taken_in_order(seed: int, tops: bool) -> None:
    chance = random.Random(seed)
    outbox, number = opened(3, 3), 0
    put: dict[tuple[int, int], list[int]] = defaultdict(list)
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    ended: set[tuple[int, int]] = set()

    async def take() -> None:
        for prompt, one in await outbox.take(0):
            key = (prompt, one.sample_index)
            assert key not in ended, "the delta with the sample must be the last"
            assert one == delta(one.sample_index, list(one.token_ids), tops=tops, ends=one.sample is not None)
            taken[key] += one.token_ids
            if one.sample is not None:
                ended.add(key)

    async def main() -> None:
        nonlocal number
        live = [(prompt, sample) for prompt in range(2) for sample in range(3)]
        every = set(live)
        while live:
            prompt, sample = chance.choice(live)
            count = chance.choice([0, 1, 1, 1, 5])
            tokens = list(range(number, number + count))
            number += count
            ends = chance.random() < 0.01
            outbox.put(prompt, delta(sample, tokens, tops=tops, ends=ends), at=1.0)
            put[prompt, sample] += tokens
            if ends:
                live.remove((prompt, sample))
            if chance.random() < 0.01:
                await take()
        while not outbox.is_done:
            await take()
        assert taken == put and ended == every and outbox.num_unread == 0

    asyncio.run(main())


def test_deltas_are_taken_in_bounded_parts() -> None:
    async def main() -> None:
        outbox = opened(1)
        for token in range(2000):
            outbox.put(0, delta(0, [token]), at=1.0)
        assert outbox.num_unread == 2000
        sizes: list[int] = []
        while outbox.num_unread:
            pieces = await outbox.take()
            sizes.append(sum(len(piece.delta.token_ids) for piece in pieces))
            assert outbox.num_unread == 2000 - sum(sizes) and len(pieces) <= 2 * MAX_SINGLE
        assert max(sizes) <= MAX_MERGED and len(sizes) < 2000 / MAX_MERGED + 3

    asyncio.run(main())


def test_times_are_those_of_the_deltas() -> None:
    outbox = opened(1, 2)
    before = [
        outbox.put(1, delta(1, tokens, ends=ends), at) for tokens, ends, at in (([], False, 1.0), ([5], False, 2.0))
    ]
    before += [outbox.put(1, delta(1, [6, 7], ends=True), 3.0)]
    times = outbox.times[1][1]
    assert before == [None, None, 2.0]
    assert (times.first_token, times.last_token, times.ended, times.num_tokens) == (2.0, 3.0, 3.0, 3)
    assert outbox.times[1][0].ended is None and outbox.times[0][0].num_tokens == 0


def test_memory_of_an_unread_stream_is_bounded() -> None:
    count = 4096
    outbox = opened(1)
    values = [float(number) for number in range(count)]  # allocated before: the engine's sample has them too
    tracemalloc.start()
    for number, value in enumerate(values):
        one = Delta(
            request_id=1,
            sample_index=0,
            token_ids=(number % 200,),
            logprobs=(value,),
            mask=(1,),
            versions=(0,),
        )
        outbox.put(0, one, at=1.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 80 * count, f"{size / count:.0f} bytes for each token"
