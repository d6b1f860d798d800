"""Threads for what does not belong on the event loop: bodies, large replies, grammars to compile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nano_inference.server.errors import ApiError, queue_full

_T = TypeVar("_T")

_MAX_JOBS = 32
"""Jobs that run or wait, unless the owner sets another number; each holds a body in memory."""
_SMALL_BODY = 16 << 10
"""Bytes of a body that does not wait behind larger ones."""
_MAX_SMALL_JOBS = 1024
"""Small bodies of one kind that are read or wait to be read."""
_NAME = "worker-"
_ENDING_S = 1.0


class WorkerPool:
    """Owns the threads, and how many jobs may wait for them."""

    def __init__(self, name: str, num_threads: int, *, max_jobs: int = _MAX_JOBS) -> None:
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=f"{_NAME}{name}")
        self._max_jobs = max_jobs
        self._num_jobs = 0

    async def run(self, work: Callable[[], _T], *, seconds: float) -> _T:
        """Run something in a thread and return what it returns; nobody waits for it longer than that.

        Raises `ApiError` 503 when too many jobs wait, and when the time is up.
        """
        if self._num_jobs >= self._max_jobs:
            raise queue_full("too many bodies and grammars are being read; try again shortly")
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


class BodyWorkers:
    """Owns the threads that read bodies: one kind that is slow to read, such as long chats, delays no other."""

    def __init__(self) -> None:
        self.large = WorkerPool("text", 2)
        """Also for large replies."""
        self._others = {
            (False, True): WorkerPool("large-chat", 2),
            (True, False): WorkerPool("small-text", 2, max_jobs=_MAX_SMALL_JOBS),
            (True, True): WorkerPool("small-chat", 2, max_jobs=_MAX_SMALL_JOBS),
        }
        """(body is small, messages are rendered) -> threads."""

    async def run(self, size: int, work: Callable[[], _T], *, renders: bool, seconds: float) -> _T:
        """Run what a body of `size` bytes asks for in a thread, as `Workshop.run` does."""
        workshop = self._others.get((size <= _SMALL_BODY, renders), self.large)
        return await workshop.run(work, seconds=seconds)

    def close(self) -> None:
        """End the threads once they are done with what they do."""
        for workshop in (self.large, *self._others.values()):
            workshop.close()


def has_stuck_threads() -> bool:
    """Return True if a thread of a closed workshop still runs after a second: a text that takes minutes to encode.

    The interpreter would wait for it at its end.
    """
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_NAME)]
    for thread in threads:
        thread.join(_ENDING_S / len(threads))
    return any(thread.is_alive() for thread in threads)
