"""Thread pools for work that would block the event loop: request bodies, large replies, grammars."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nano_inference.server.errors import ApiError, queue_full

_T = TypeVar("_T")

_MAX_JOBS = 32
"""Default limit of running and waiting jobs; each holds a body in memory."""
_SMALL_BODY = 16 << 10
"""Maximum bytes of a small body, which has separate threads."""
_MAX_SMALL_JOBS = 1024
"""Limit of running and waiting jobs of small bodies, per kind."""
_RENDERING = "the chat template rendered its messages"
_NAME = "worker-"
_JOIN_TIMEOUT_S = 1.0


class WorkerPool:
    """Owns threads, and the number of jobs that run or wait."""

    def __init__(
        self, name: str, num_threads: int, *, max_jobs: int = _MAX_JOBS, task: str = "it was being processed"
    ) -> None:
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=f"{_NAME}{name}")
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._task = task
        """What the message of a request that took too long says it was doing."""

    async def run(self, work: Callable[[], _T], *, seconds: float) -> _T:
        """Return `work()`, run in a thread.

        Raises `ApiError` 503 if too many jobs wait, and after `seconds`.
        """
        if self._num_jobs >= self._max_jobs:
            raise queue_full("too many bodies and grammars are being processed; try again shortly")
        loop = asyncio.get_running_loop()
        self._num_jobs += 1
        job = self._threads.submit(work)
        job.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._end_job))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise ApiError(
                503,
                f"the request took more than {seconds:.3g} s (--request-timeout) while {self._task}",
                code="timeout",
                headers={"x-should-retry": "false"},
            ) from None

    def close(self) -> None:
        """End the threads after their current jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_job(self) -> None:
        self._num_jobs -= 1


class BodyWorkers:
    """Owns the pools that parse bodies: small, large, with and without rendering, so that slow ones delay no others."""

    def __init__(self) -> None:
        self.large = WorkerPool("text", 2)
        """Also used for large replies."""
        self._others = {
            (False, True): WorkerPool("large-chat", 2, task=_RENDERING),
            (True, False): WorkerPool("small-text", 2, max_jobs=_MAX_SMALL_JOBS),
            (True, True): WorkerPool("small-chat", 4, max_jobs=_MAX_SMALL_JOBS, task=_RENDERING),
        }
        """(body is small, messages are rendered) -> pool."""

    async def run(self, size: int, work: Callable[[], _T], *, renders: bool, seconds: float) -> _T:
        """Run `work` for a body of `size` bytes in the pool of its kind: `WorkerPool.run`."""
        pool = self._others.get((size <= _SMALL_BODY, renders), self.large)
        return await pool.run(work, seconds=seconds)

    def close(self) -> None:
        """End the threads after their current jobs."""
        for pool in (self.large, *self._others.values()):
            pool.close()


def has_stuck_threads() -> bool:
    """Return True if a thread of a closed pool still runs after a second, which delays the interpreter's exit."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_NAME)]
    for thread in threads:
        thread.join(_JOIN_TIMEOUT_S / len(threads))
    return any(thread.is_alive() for thread in threads)
