"""What a route waits for: the deltas of its requests, in order, then the end; or the news that there is none.

Lives on the event loop; only `EngineLink` puts things in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nano_inference.server.backlog import Backlog, Piece
from nano_inference.server.errors import ApiError
from nano_inference.server.structured import Structure
from nano_inference.types import Delta, EngineRequest

MAX_UNREAD = 4096
"""Tokens of one sample that may wait for a client that does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest(EngineRequest):
    """What the engine is asked for one prompt; already checked against the engine's limits."""

    structure: Structure | None = None
    """What the answer must be; its matcher takes time to make, and is not in `make_matcher` before that is done."""


@dataclass(slots=True)
class SampleTimes:
    """When things happened to one sample; seconds of the monotonic clock, None where it did not happen."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0


def bare_name(name: str) -> str:
    """Return a client's name of a request without the prefix that replies put before it."""
    return name.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _do_nothing() -> None:
    """Nothing of a new ticket waits."""


class Ticket:
    """The event loop's end of one call: a bounded queue of deltas."""

    def __init__(self, requests: Sequence[PromptRequest], names: Iterable[str] = ()) -> None:
        self.requests = tuple(requests)
        self.names = frozenset(map(bare_name, names))
        """What clients call it, when they want it aborted."""
        self.arrived = time.monotonic()
        self.times = [[SampleTimes(self.arrived) for _ in range(request.num_samples)] for request in self.requests]
        """One for each prompt and sample."""
        self.dispatch_now: Callable[[], None] = _do_nothing
        """Gives the engine what waits for its client's turn."""
        self.is_closed = False
        """Nobody waits any more."""
        self.end_reason = "abort"
        """What those samples are counted as that have not ended when it is closed."""
        self._unread = Backlog()
        self._most_unread = MAX_UNREAD * sum(request.num_samples for request in self.requests)
        self._num_open = sum(request.num_samples for request in self.requests)
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended and everything was taken."""
        return self._num_open == 0 and not self._unread

    def put(self, prompt_index: int, delta: Delta) -> None:
        """Add what a step gave. A client that leaves too much unread loses the rest."""
        if self._unread.num_tokens >= self._most_unread:
            self.fail(ApiError(503, "the client reads too slowly"))
            return
        self._unread.put(prompt_index, delta)
        self._num_open -= delta.sample is not None
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let `take` raise that, at once and from now on. The first failure stands."""
        self._failure = self._failure or error
        self._news.set()

    def close(self) -> None:
        """Drop what refers back to the ticket, so that its prompts are freed without the cyclic garbage collector.

        A failure that was raised refers to it through its traceback.
        """
        self.is_closed = True
        self.dispatch_now = _do_nothing
        self._failure = None

    async def take(self, timeout: float) -> list[Piece]:
        """Return what came first since the last time; wait `timeout` seconds at most, then return nothing.

        Raises what the ticket failed with.
        """
        if not self._unread and self._failure is None and self._num_open:
            await self._wait(timeout)
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        return self._unread.take()

    async def _wait(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass
