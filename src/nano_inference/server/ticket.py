"""`Ticket`: the queue of deltas that a coroutine awaits for one call.

Used on the event loop; only `EngineLink` puts deltas into it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nano_inference.server.backlog import Backlog, PromptDelta
from nano_inference.server.errors import ApiError
from nano_inference.server.structured import Structure
from nano_inference.types import Delta, EngineRequest

MAX_UNREAD = 4096
"""Limit of unread tokens per sample of a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest(EngineRequest):
    """The engine request of one prompt, checked against the engine's limits."""

    structure: Structure | None = None
    """Structure of the answer; `make_matcher` includes its matcher only after it was compiled."""


@dataclass(slots=True)
class SampleTimes:
    """Times of one sample's events: seconds on the monotonic clock, None if the event did not happen."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0


def bare_id(request_id: str) -> str:
    """Return a request id without the prefix that replies add."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _do_nothing() -> None:
    """Do nothing: no request of a new ticket waits."""


class Ticket:
    """Owns a bounded queue of one call's deltas, and the times of its samples."""

    def __init__(self, requests: Sequence[PromptRequest], names: Iterable[str] = ()) -> None:
        self.requests = tuple(requests)
        self.names = frozenset(map(bare_id, names))
        """Ids by which clients can abort the call."""
        self.arrived = time.monotonic()
        self.times = [[SampleTimes(self.arrived) for _ in range(request.num_samples)] for request in self.requests]
        """Indexed by prompt and sample."""
        self.dispatch_now: Callable[[], None] = _do_nothing
        """Passes requests that wait for their turn to the engine."""
        self.end_reason = "abort"
        """Finish reason recorded for samples that are still open when the ticket is closed."""
        self._unread = Backlog()
        self._most_unread = MAX_UNREAD * sum(request.num_samples for request in self.requests)
        self._num_open = sum(request.num_samples for request in self.requests)
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """True if every sample has ended and all deltas were taken."""
        return self._num_open == 0 and not self._unread

    def put(self, prompt_index: int, delta: Delta) -> None:
        """Add a delta. Fails the ticket if its client has too many unread tokens."""
        if self._unread.num_tokens >= self._most_unread:
            self.fail(ApiError(503, "the client reads too slowly"))
            return
        self._unread.put(prompt_index, delta)
        self._num_open -= delta.sample is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Let `take` raise the error from now on. The first error is kept."""
        self._failure = self._failure or error
        self._changed.set()

    def close(self) -> None:
        """Break reference cycles, so that the prompts are freed without the cyclic garbage collector.

        A raised failure refers to the ticket through its traceback.
        """
        self.dispatch_now = _do_nothing
        self._failure = None

    async def take(self, timeout: float) -> list[PromptDelta]:
        """Return the oldest unread deltas; wait up to `timeout` seconds for one, then return nothing.

        Raises the error given to `fail`.
        """
        if not self._unread and self._failure is None and self._num_open:
            await self._wait(timeout)
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        return self._unread.take()

    async def _wait(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass
