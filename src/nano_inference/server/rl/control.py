"""Pause, abort, sleep: what a trainer does to requests. On the event loop, through the bridge, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import Receive

from nano_inference.server.bridge import Bridge
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import ClientGone
from nano_inference.server.rl.threads import unless_gone
from nano_inference.server.rl.updates import refusal
from nano_inference.server.served import ServedEngine
from nano_inference.types import EnginePaused, PauseMode

MEMORY = frozenset({"weights", "kv_cache"})
"""What sleep gives back; our engine gives both or neither."""
SCHEDULING = "scheduling"
"""What vLLM calls the part that a sleep of level 0 stops."""


class Control:
    """Owns the knowledge of who waits for a pause, and what sleeps."""

    def __init__(self, bridge: Bridge, engine: Callable[[], ServedEngine]) -> None:
        self._bridge = bridge
        self._engine = engine
        self._num_pausing = 0
        """Clients that wait for the engine to be paused."""
        self.asleep: set[str] = set()
        """What was put to sleep and not woken yet."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool, receive: Receive) -> int:
        """Pause; return how many samples were aborted. Pausing again is allowed.

        A client that leaves while it waits for "wait" takes its pause back, unless another one waits for it, too.
        Raises `ApiError` 409 when somebody resumes meanwhile, or when the engine sleeps.
        """
        engine = self._engine()
        if mode == "wait":
            await self._pause_when_drained(clear_cache, receive)
            return 0

        def pause() -> None:
            engine.pause("keep", clear_cache=clear_cache)

        if mode == "abort":
            return await self._bridge.end_requests(first=pause)
        await self._bridge.call(pause)
        return 0

    async def _pause_when_drained(self, clear_cache: bool, receive: Receive) -> None:
        engine = self._engine()
        self._num_pausing += 1
        try:
            found = await self._bridge.watch(
                lambda: None if engine.is_pausing else engine.is_paused,
                first=lambda: engine.pause("wait", clear_cache=clear_cache, blocking=False),
            )
            is_paused = await unless_gone(receive, found)
        except ClientGone:
            if self._num_pausing == 1:
                await self._bridge.call(engine.cancel_pause)
            raise
        except ApiError:
            raise
        except Exception as error:
            raise refusal(error) from None
        finally:
            self._num_pausing -= 1
        if not is_paused:
            raise ApiError(409, "the engine was resumed before it was paused", code="resumed")

    async def resume(self) -> None:
        """Go on. Resuming an engine that runs is allowed."""
        await self._bridge.call(self._engine().resume)

    async def abort(self, names: Iterable[str] | None) -> int:
        """End the requests of these names, or all; return how many samples that were."""
        return await self._bridge.end_requests(names)

    async def flush(self, *, recompute: bool = False) -> int:
        """Forget cached prefixes, with `recompute` also the K/V of what runs; return how many blocks are free by that.

        Raises `ApiError` 409 for `recompute` while the engine is pausing.
        """
        engine = self._engine()

        def flush() -> int:
            if not recompute:
                return engine.flush_cache()
            if engine.is_pausing:
                raise ApiError(409, "reset_running_requests: the engine is pausing", code="busy")
            was_paused = engine.is_paused
            engine.pause("keep", clear_cache=True)
            if not was_paused:
                engine.resume()
            return engine.flush_cache()

        return await self._bridge.call(flush)

    async def sleep(self, level: int, mode: PauseMode, receive: Receive) -> None:
        """Give memory back as vLLM's levels say; `mode` is what happens to requests before. 0 only pauses.

        On a CPU the weights of level 1 stay where they are. What sleeps does not step, so that no pause is left behind.
        """
        was_paused = self._engine().is_paused
        await self.pause(mode, clear_cache=False, receive=receive)
        if level == 0:
            self.asleep.add(SCHEDULING)
            return
        await self.release(MEMORY, discard_weights=level == 2)
        if not was_paused:
            await self.resume()

    async def release(self, what: Iterable[str], *, discard_weights: bool = False) -> None:
        """Give memory back: whatever of it is named, the K/V and (on a GPU) the weights go."""
        engine = self._engine()
        try:
            await self._bridge.call(lambda: engine.sleep(discard_weights=discard_weights))
        except EnginePaused as error:
            raise refusal(error) from None
        self.asleep |= set(what) & MEMORY

    async def wake(self, what: Iterable[str] | None) -> None:
        """Take memory again once everything that was given back has been named; None names all."""
        named = MEMORY | {SCHEDULING} if what is None else frozenset(what)
        before, self.asleep = self.asleep, self.asleep - named
        engine = self._engine()
        if before & MEMORY and not self.asleep & MEMORY:
            await self._bridge.call(engine.wake)
        if SCHEDULING in before and SCHEDULING not in self.asleep:
            await self._bridge.call(engine.resume)
