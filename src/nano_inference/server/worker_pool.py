"""Thread pools for work that would block the event loop: request bodies, large replies, grammars."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from nano_inference.server.errors import ApiError, queue_full, refused
from nano_inference.server.generation import Generation
from nano_inference.server.structured import Structure
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.stops import both
from nano_inference.types import BadRequest, MatcherFactory

_T = TypeVar("_T")

MAX_STRUCTURES = 8  # different structures in one request, over all prompts
_MAX_JOBS = 32  # default limit of running and waiting jobs; each holds a body in memory
_MAX_SMALL_JOBS = 1024  # limit of running and waiting jobs of small bodies, per kind
_SMALL_BODY = 16 << 10  # maximum bytes of a small body, which has separate threads
_RENDERING = "the chat template rendered its messages"
_NAME = "worker-"
_JOIN_TIMEOUT_S = 1.0


class WorkerPool:
    """Owns threads, and the number of jobs that run or wait. `task`: what an error says was being done."""

    def __init__(
        self, name: str, num_threads: int, *, max_jobs: int = _MAX_JOBS, task: str = "it was being processed"
    ) -> None:
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=f"{_NAME}{name}")
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._task = task

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
            text = f"the request took more than {seconds:.3g} s (--request-timeout) while {self._task}"
            raise ApiError(503, text, code="timeout", headers={"x-should-retry": "false"}) from None

    def close(self) -> None:
        """End the threads after their current jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_job(self) -> None:
        self._num_jobs -= 1


class BodyWorkers:
    """Owns the pools that parse bodies: small, large, with and without rendering, so that slow ones delay no others."""

    def __init__(self) -> None:
        self.large = WorkerPool("text", 2)  # also used for large replies
        self._others = {  # (body is small, messages are rendered) -> pool
            (False, True): WorkerPool("large-chat", 2, task=_RENDERING),
            (True, False): WorkerPool("small-text", 2, max_jobs=_MAX_SMALL_JOBS),
            (True, True): WorkerPool("small-chat", 4, max_jobs=_MAX_SMALL_JOBS, task=_RENDERING),
        }

    async def run(self, size: int, work: Callable[[], _T], *, renders: bool, seconds: float) -> _T:
        """Run `work` for a body of `size` bytes in the pool of its kind: `WorkerPool.run`."""
        pool = self._others.get((size <= _SMALL_BODY, renders), self.large)
        return await pool.run(work, seconds=seconds)

    def close(self) -> None:
        """End the threads after their current jobs."""
        for pool in (self.large, *self._others.values()):
            pool.close()


class Compilers:
    """Owns the thread that compiles grammars; concurrent requests for one grammar share one compilation."""

    def __init__(self) -> None:
        self._pool = WorkerPool("grammar", 1)
        self._pending: dict[Grammar, asyncio.Task[MatcherFactory]] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def add_matchers(self, asked: Generation, grammars: Grammars, seconds: float) -> Generation:
        """Return the generation with a grammar matcher in each request that has a structure.

        Raises `ApiError` naming the field of a structure that cannot be compiled, and 503 after `seconds`.
        """
        different = list(dict.fromkeys(one for one in asked.structures if one is not None))
        if not different:
            return asked
        if len(different) > MAX_STRUCTURES:
            name = different[0].field
            text = f"{name}: at most {MAX_STRUCTURES} different structures in one request, got {len(different)}"
            raise ApiError(400, text, param=name)
        matchers = {structure: await self._matcher(structure, grammars, seconds) for structure in different}
        requests = (
            one if structure is None else replace(one, make_matcher=both(one.make_matcher, matchers[structure]))
            for one, structure in zip(asked.requests, asked.structures, strict=True)
        )
        return replace(asked, requests=tuple(requests))

    async def _matcher(self, structure: Structure, grammars: Grammars, seconds: float) -> MatcherFactory:
        grammar = structure.grammar
        known = grammars.known(grammar)
        if known is not None:
            return known
        task = self._pending.get(grammar)
        if task is None:
            compiling = self._pool.run(lambda: grammars.matcher(grammar), seconds=seconds)
            task = self._pending[grammar] = asyncio.get_running_loop().create_task(compiling)
            task.add_done_callback(lambda done: self._end(grammar, done))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            raise ApiError(503, "the request timed out while its grammar was compiled", code="timeout") from None
        except BadRequest as error:
            raise refused(structure.field, str(error)) from None

    def _end(self, grammar: Grammar, done: asyncio.Task[MatcherFactory]) -> None:
        del self._pending[grammar]
        if not done.cancelled():
            done.exception()  # retrieved even if all waiters are gone: asyncio would log it otherwise

    def close(self) -> None:
        self._pool.close()


def has_stuck_threads() -> bool:
    """Return True if a thread of a closed pool still runs after a second, which delays the interpreter's exit."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_NAME)]
    for thread in threads:
        thread.join(_JOIN_TIMEOUT_S / len(threads))
    return any(thread.is_alive() for thread in threads)
