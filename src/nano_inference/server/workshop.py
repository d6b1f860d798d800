"""Threads for what takes too long on the event loop: large bodies, large replies, grammars to compile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nano_inference.server.errors import ApiError, queue_full

_T = TypeVar("_T")

_MAX_JOBS = 32
"""Jobs that run or wait; each holds a body in memory."""


class Workshop:
    """Owns the threads, and how many jobs may wait for them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)
        self._num_jobs = 0

    async def run(self, work: Callable[[], _T], *, seconds: float) -> _T:
        """Run something in a thread and return what it returns; nobody waits for it longer than that.

        Raises `ApiError` 503 when too many jobs wait, and when the time is up.
        """
        if self._num_jobs >= _MAX_JOBS:
            raise queue_full("too many large bodies and grammars are being read; try again shortly")
        loop = asyncio.get_running_loop()
        self._num_jobs += 1
        job = self._threads.submit(work)
        job.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._end_job))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise ApiError(
                503, "the request's time was up while it was read", code="timeout", headers={"x-should-retry": "false"}
            ) from None

    def close(self) -> None:
        """End the threads once they are done with what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_job(self) -> None:
        self._num_jobs -= 1
