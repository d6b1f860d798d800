"""Unread deltas of a client: complete, in order, in bounded memory."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections import defaultdict
from typing import Any

import pytest

from nano_inference.server.backlog import MAX_MERGED, MAX_SINGLE, Backlog
from nano_inference.server.ticket import MAX_UNREAD, PromptRequest, Ticket
from nano_inference.types import Delta, SamplingParams, TokenLogprob, TrainingSample

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


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("tops", [False, True])
def test_backlog_returns_all_deltas_in_order(seed: int, tops: bool) -> None:
    chance = random.Random(seed)
    backlog, number = Backlog(), 0
    put: dict[tuple[int, int], list[int]] = defaultdict(list)
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    ended: set[tuple[int, int]] = set()

    def take() -> None:
        for prompt, one in backlog.take():
            key = (prompt, one.sample_index)
            assert key not in ended, "the delta with the sample must be the last"
            assert one == delta(one.sample_index, list(one.token_ids), tops=tops, ends=one.sample is not None)
            taken[key] += one.token_ids
            if one.sample is not None:
                ended.add(key)

    live = [(prompt, sample) for prompt in range(2) for sample in range(3)]
    every = set(live)
    while live:
        prompt, sample = chance.choice(live)
        count = chance.choice([0, 1, 1, 1, 5])
        tokens = list(range(number, number + count))
        number += count
        ends = chance.random() < 0.01
        backlog.put(prompt, delta(sample, tokens, tops=tops, ends=ends))
        put[prompt, sample] += tokens
        if ends:
            live.remove((prompt, sample))
        if chance.random() < 0.01:
            take()
    while backlog:
        take()
    assert taken == put and ended == every and backlog.num_tokens == 0


def test_backlog_is_returned_in_bounded_parts() -> None:
    backlog = Backlog()
    for token in range(2000):
        backlog.put(0, delta(0, [token]))
    assert backlog.num_tokens == 2000
    sizes = []
    while backlog:
        sizes.append(sum(len(piece.delta.token_ids) for piece in backlog.take()))
        assert backlog.num_tokens == 2000 - sum(sizes)
    assert sizes[0] == MAX_SINGLE and max(sizes) <= MAX_MERGED


def test_unread_stream_memory_is_bounded() -> None:
    async def main() -> None:
        ticket = Ticket([PromptRequest(prompt=(1,), params=SamplingParams())])
        values = [float(number) for number in range(MAX_UNREAD)]  # allocated before: the engine's sample has them too
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
            ticket.put(0, one)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size < 80 * MAX_UNREAD, f"{size / MAX_UNREAD:.0f} bytes for each token"
        assert sum(len(piece.delta.token_ids) for piece in await ticket.take(0)) == MAX_SINGLE
        assert not ticket.is_done

    asyncio.run(main())
