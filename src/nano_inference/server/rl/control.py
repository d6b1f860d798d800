"""Pause, abort, sleep: what a trainer does to requests. On the event loop, through the bridge, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import Receive

from nano_inference.control import Control as EngineControl
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import ClientGone
from nano_inference.server.rl.threads import unless_gone
from nano_inference.server.rl.updates import refusal
from nano_inference.types import EnginePaused, PauseMode

MEMORY = frozenset({"weights", "kv_cache"})
"""What sleep gives back; our engine gives both or neither."""
SCHEDULING = "scheduling"
"""What vLLM calls the part that a sleep of level 0 stops."""


class Control:
    """Owns the knowledge of who waits for a pause, and what sleeps."""

    def __init__(self, link: EngineLink, engine: Callable[[], EngineControl]) -> None:
        self._link = link
        self._engine = engine
        self._num_pausing = 0
        """Clients that wait for the engine to be paused."""
        self.asleep: frozenset[str] = frozenset()
        """What was put to sleep and not woken yet. Changed on the engine's thread, together with the engine."""
        self._num_overtaken = 0
        """How often somebody resumed, or paused without waiting for what had begun. The engine's thread's own."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool, receive: Receive) -> int:
        """Pause; return how many samples were aborted. Pausing again is allowed.

        A client that leaves while it waits for "wait" takes its pause back, unless another one waits for it, too.
        Raises `ApiError` 409 when somebody resumes or pauses otherwise meanwhile, or when the engine sleeps.
        """
        engine = self._engine()
        if mode == "wait":
            await self._pause_when_drained(clear_cache, receive)
            return 0

        def pause() -> None:
            self._num_overtaken += engine.is_pausing and mode == "keep"
            engine.pause("keep", clear_cache=clear_cache)

        if mode == "abort":
            return await self._link.end_requests(first=pause)
        await self._link.call(pause)
        return 0

    async def _pause_when_drained(self, clear_cache: bool, receive: Receive) -> None:
        engine = self._engine()
        self._num_pausing += 1
        begun_at = 0

        def begin() -> None:
            nonlocal begun_at
            begun_at = self._num_overtaken
            engine.pause("wait", clear_cache=clear_cache, blocking=False)

        def look() -> bool | None:
            if self._num_overtaken != begun_at:
                return False
            return None if engine.is_pausing else engine.is_paused

        try:
            found = await self._link.watch(look, first=begin)
            is_paused = await unless_gone(receive, found) and await self._link.call(lambda: look() is True)
        except ClientGone:
            if self._num_pausing == 1:
                await self._link.call(engine.cancel_pause)
            raise
        except ApiError:
            raise
        except Exception as error:
            raise refusal(error) from None
        finally:
            self._num_pausing -= 1
        if not is_paused:
            text = "overtaken by another command: the engine was resumed before it was paused, or paused otherwise"
            raise ApiError(409, text, code="overtaken")

    async def resume(self) -> None:
        """Go on, also after a sleep of level 0. Resuming an engine that runs is allowed."""
        engine = self._engine()

        def resume() -> None:
            self._num_overtaken += 1
            engine.resume()
            self.asleep -= {SCHEDULING}

        await self._link.call(resume)

    async def abort(self, names: Iterable[str] | None) -> int:
        """End the requests of these names, or all; return how many samples that were."""
        return await self._link.end_requests(names)

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

        return await self._link.call(flush)

    async def sleep(self, level: int, mode: PauseMode, receive: Receive) -> None:
        """Give memory back as vLLM's levels say; `mode` is what happens to requests before. 0 only pauses.

        On a CPU the weights of level 1 stay where they are. What sleeps does not step, so that no pause is left behind.
        """
        was_paused = self._engine().is_paused
        await self.pause(mode, clear_cache=False, receive=receive)
        if level == 0:
            await self._link.call(lambda: self._note_asleep({SCHEDULING}))
            return
        await self.release(MEMORY, discard_weights=level == 2)
        if not was_paused:
            await self.resume()

    async def release(self, what: Iterable[str], *, discard_weights: bool = False) -> None:
        """Give memory back: whatever of it is named, the K/V and (on a GPU) the weights go; nothing when none is."""
        engine, named = self._engine(), MEMORY.intersection(what)

        def release() -> None:
            engine.sleep(discard_weights=discard_weights)
            self._note_asleep(named)

        try:
            if named:
                await self._link.call(release)
        except EnginePaused as error:
            raise refusal(error) from None

    def _note_asleep(self, what: Iterable[str]) -> None:
        self.asleep |= frozenset(what)

    async def wake(self, what: Iterable[str] | None) -> None:
        """Take memory again once everything that was given back has been named; None names all."""
        named = MEMORY | {SCHEDULING} if what is None else frozenset(what)
        engine = self._engine()

        def wake() -> None:
            before, left = self.asleep, self.asleep - named
            if engine.is_asleep and not left & MEMORY:
                engine.wake()
            if SCHEDULING in before - left:
                self._num_overtaken += 1
                engine.resume()
            self.asleep = left

        await self._link.call(wake)
