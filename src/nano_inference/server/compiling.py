"""Grammars for calls: compiled in a thread, once for all that wait for the same one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nano_inference.server.call import Call
from nano_inference.server.errors import ApiError
from nano_inference.server.structured import Structure
from nano_inference.server.worker_pool import WorkerPool
from nano_inference.text.bad_words import both
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.types import BadRequest, MatcherFactory

MAX_STRUCTURES = 8
"""Different structures that the prompts of one call may ask for."""


class Compilers:
    """Owns the thread that compiles, and knows what it is at."""

    def __init__(self) -> None:
        self._workshop = WorkerPool("grammar", 1)
        self._under_way: dict[Grammar, asyncio.Task[MatcherFactory]] = {}

    async def hold(self, call: Call, grammars: Grammars, seconds: float) -> Call:
        """Return the call with its asks held to the structures they name.

        Raises `ApiError` naming the field of a structure that cannot be compiled, and 503 when the time is up.
        """
        asked = list(dict.fromkeys(request.structure for request in call.requests if request.structure is not None))
        if len(asked) > MAX_STRUCTURES:
            message = (
                f"{asked[0].field}: at most {MAX_STRUCTURES} different structures in one request, got {len(asked)}"
            )
            raise ApiError(400, message, param=asked[0].field)
        made = {structure: await self._made(structure, grammars, seconds) for structure in asked}
        requests = (
            request
            if request.structure is None
            else replace(request, make_matcher=both(request.make_matcher, made[request.structure]))
            for request in call.requests
        )
        return replace(call, requests=tuple(requests))

    async def _made(self, structure: Structure, grammars: Grammars, seconds: float) -> MatcherFactory:
        known = grammars.known(structure.grammar)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._task(structure.grammar, grammars, seconds))
        except TimeoutError:
            raise ApiError(503, "the request's time was up while its grammar was compiled", code="timeout") from None
        except BadRequest as error:
            raise ApiError(400, f"{structure.field}: {error}", param=structure.field) from None

    def _task(self, grammar: Grammar, grammars: Grammars, seconds: float) -> asyncio.Task[MatcherFactory]:
        """Return what compiles a grammar, begun by whoever asked for it first."""
        task = self._under_way.get(grammar)
        if task is None:
            task = asyncio.get_running_loop().create_task(
                self._workshop.run(lambda: grammars.matcher(grammar), seconds=seconds)
            )
            self._under_way[grammar] = task
            task.add_done_callback(lambda done: self._end(grammar, done))
        return task

    def _end(self, grammar: Grammar, done: asyncio.Task[MatcherFactory]) -> None:
        del self._under_way[grammar]
        if not done.cancelled():
            done.exception()  # looked at, also when everybody who waited has left

    def close(self) -> None:
        """End the thread once it is done with what it does."""
        self._workshop.close()
