"""Draft tokens: what a drafter is, and how many drafts a step computes. The core verifies each of them.

Integers only; costs are counted in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple, Protocol

CPU_WEIGHT_TOKENS, CUDA_WEIGHT_TOKENS = 6, 128
"""Tokens whose arithmetic takes as long as reading the weights. CPU: fitted to steps of 1 to 24 tokens, which gave 5
(int8) to 10 (weights as in the file). CUDA: computed from arithmetic and memory throughput of devices."""


class Draft(NamedTuple):
    """Draft tokens, and the probability that each is accepted if those before it are."""

    tokens: tuple[int, ...] = ()
    chance: float = 0.0


class Drafter(Protocol):
    """Proposes draft tokens for the samples that are open."""

    def open(self, sample_id: int, request_id: int, tokens: Sequence[int], num_prompt: int) -> None:
        """Register a sample; its caller appends to `tokens`. All samples of a request are registered first."""

    def close(self, sample_id: int, request_id: int) -> None:
        """Forget a sample. Ignores an unknown one."""

    def disable(self, sample_id: int) -> None:
        """Propose no more tokens for a sample."""

    def draft(self, sample_id: int) -> Draft:
        """Return draft tokens that may follow a sample's last token; none for an unknown sample."""

    def last_draft(self, sample_id: int) -> tuple[int, ...]:
        """Return the tokens of the sample's last draft."""


MakeDrafter = Callable[[int], Drafter]  # makes a drafter that proposes at most so many tokens at a time


class Offer(NamedTuple):
    """The most draft tokens that a row could compute, and their acceptance."""

    limit: int
    chance: float


def choose_drafts(offers: Sequence[Offer], num_tokens: int, room: int, weight_tokens: int) -> list[int]:
    """Return how many draft tokens each row computes in a step that computes `num_tokens` without any.

    Maximises accepted tokens per unit of time. A step of n tokens is modelled to take n + w, where w = `weight_tokens`.
    Tokens that are not drafts are worth 1; the j-th draft token of a row is worth chance^j, the probability that it is
    accepted. The most probable remaining token is added while chance^j · (n + w) > worth, up to `room` tokens: small
    steps accept doubtful drafts, large steps only nearly certain ones.
    """
    counts = [0] * len(offers)
    heap = [(-offer.chance, index) for index, offer in enumerate(offers) if offer.limit > 0]
    heapify(heap)
    worth, duration = float(num_tokens), num_tokens + weight_tokens
    while heap and room > 0 and -heap[0][0] * duration > worth:
        chance, index = heap[0]
        counts[index] += 1
        room, worth, duration = room - 1, worth - chance, duration + 1
        if counts[index] < offers[index].limit:
            heapreplace(heap, (chance * offers[index].chance, index))
        else:
            heappop(heap)
    return counts
