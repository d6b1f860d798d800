"""Pause, sleep and cache flush for trainers; executed by the engine thread between two steps."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Receive

from nano_inference.async_engine import DrivenEngine
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import while_connected
from nano_inference.types import PauseMode

MEMORY = frozenset({"weights", "kv_cache"})
"""The parts whose memory sleep releases; the engine releases both or neither."""
SCHEDULING = "scheduling"  # vLLM's name of the part that sleep level 0 stops


class Control:
    """Owns the set of sleeping parts."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.asleep: frozenset[str] = frozenset()
        """Sleeping parts. Changed on the engine thread, together with the engine."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool, receive: Receive) -> int:
        """Pause the engine, which may be paused already; return the number of aborted samples.

        If the client disconnects during mode "wait", the pause is cancelled unless another client waits for it too.
        Raises `ApiError` 409 if another command resumes or pauses the engine meanwhile, `EnginePaused` if it sleeps.
        """
        if mode == "abort":
            return await self._link.end_requests(first=lambda engine: engine.pause("keep", clear_cache=clear_cache))
        if not await while_connected(self._link.engine.pause(mode, clear_cache=clear_cache), receive):
            text = "overtaken by a command that resumed the engine before it was paused, or paused it in another mode"
            raise ApiError(409, text, code="overtaken")
        return 0

    async def resume(self) -> None:
        """Resume the engine, also after sleep level 0 and if it is not paused."""
        await self._link.engine.resume(first=lambda _: self._add_asleep(wakes={SCHEDULING}))

    async def flush(self, *, recompute: bool = False) -> int:
        """Drop cached prefixes; return the number of freed blocks.

        `recompute` also drops the K/V of running requests, which compute it again. Raises `ApiError` 409 for
        `recompute` while the engine is pausing.
        """

        def flush(engine: DrivenEngine) -> int:
            if recompute and engine.is_pausing:
                raise ApiError(409, "reset_running_requests: the engine is pausing", code="busy")
            if recompute:
                was_paused = engine.is_paused
                engine.pause("keep", clear_cache=True)
                if not was_paused:
                    engine.resume()
            return engine.flush_cache()

        return await self._link.engine.call(flush)

    async def sleep(self, level: int, mode: PauseMode, receive: Receive) -> None:
        """Pause with `mode`, then release memory by vLLM's level: 0 none, 1 KV cache and weights, 2 discards weights.

        On a CPU level 1 keeps the weights in place. Levels 1 and 2 leave no pause behind: a sleeping engine does not
        step.
        """
        was_paused = await self._link.engine.call(lambda engine: engine.is_paused)
        await self.pause(mode, clear_cache=False, receive=receive)
        if level == 0:
            await self._link.engine.call(lambda _: self._add_asleep({SCHEDULING}))
            return
        await self.release(MEMORY, discard_weights=level == 2)
        if not was_paused:
            await self.resume()

    async def release(self, what: Iterable[str], *, discard_weights: bool = False) -> None:
        """Release the KV cache and (on a GPU) the weights if `what` names at least one of them.

        Raises `EnginePaused` while the engine is pausing.
        """

        def release(engine: DrivenEngine) -> None:
            engine.sleep(discard_weights=discard_weights)
            self._add_asleep(named)

        if named := MEMORY.intersection(what):
            await self._link.engine.call(release)

    async def wake(self, what: Iterable[str] | None) -> None:
        """Wake the named parts, or all if None; memory is allocated again once all released parts are named."""
        named = MEMORY | {SCHEDULING} if what is None else frozenset(what)

        def wake(engine: DrivenEngine) -> bool:
            before, left = self.asleep, self.asleep - named
            if engine.is_asleep and not left & MEMORY:
                engine.wake()
            self.asleep = left
            return SCHEDULING in before - left

        await self._link.engine.resume(first=wake)

    def _add_asleep(self, what: Iterable[str] = (), *, wakes: Iterable[str] = ()) -> None:
        self.asleep = self.asleep.difference(wakes).union(what)
