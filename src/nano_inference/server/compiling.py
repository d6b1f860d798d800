"""Compiles the grammars of calls in a thread; concurrent requests for one grammar share one compilation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nano_inference.server.call import Call
from nano_inference.server.errors import ApiError
from nano_inference.server.structured import Structure
from nano_inference.server.worker_pool import WorkerPool
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.stops import both
from nano_inference.types import BadRequest, MatcherFactory

MAX_STRUCTURES = 8  # different structures in one call, over all prompts


class Compilers:
    """Owns the compiling thread and its pending grammars."""

    def __init__(self) -> None:
        self._pool = WorkerPool("grammar", 1)
        self._pending: dict[Grammar, asyncio.Task[MatcherFactory]] = {}

    @property
    def num_pending(self) -> int:
        """Grammars that are being compiled or wait."""
        return len(self._pending)

    async def add_matchers(self, call: Call, grammars: Grammars, seconds: float) -> Call:
        """Return the call with a grammar matcher in each request that has a structure.

        Raises `ApiError` naming the field of a structure that cannot be compiled, and 503 after `seconds`.
        """
        asked = list(dict.fromkeys(request.structure for request in call.requests if request.structure is not None))
        if len(asked) > MAX_STRUCTURES:
            message = (
                f"{asked[0].field}: at most {MAX_STRUCTURES} different structures in one request, got {len(asked)}"
            )
            raise ApiError(400, message, param=asked[0].field)
        matchers = {structure: await self._matcher(structure, grammars, seconds) for structure in asked}
        requests = (
            request
            if request.structure is None
            else replace(request, make_matcher=both(request.make_matcher, matchers[request.structure]))
            for request in call.requests
        )
        return replace(call, requests=tuple(requests))

    async def _matcher(self, structure: Structure, grammars: Grammars, seconds: float) -> MatcherFactory:
        known = grammars.known(structure.grammar)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._task(structure.grammar, grammars, seconds))
        except TimeoutError:
            raise ApiError(503, "the request timed out while its grammar was compiled", code="timeout") from None
        except BadRequest as error:
            raise ApiError(400, f"{structure.field}: {error}", param=structure.field) from None

    def _task(self, grammar: Grammar, grammars: Grammars, seconds: float) -> asyncio.Task[MatcherFactory]:
        """Return the grammar's pending compilation; start it if there is none."""
        task = self._pending.get(grammar)
        if task is None:
            task = asyncio.get_running_loop().create_task(
                self._pool.run(lambda: grammars.matcher(grammar), seconds=seconds)
            )
            self._pending[grammar] = task
            task.add_done_callback(lambda done: self._end(grammar, done))
        return task

    def _end(self, grammar: Grammar, done: asyncio.Task[MatcherFactory]) -> None:
        del self._pending[grammar]
        if not done.cancelled():
            done.exception()  # retrieved even if all waiters are gone: asyncio would log it otherwise

    def close(self) -> None:
        """End the thread after its current compilation."""
        self._pool.close()
