"""New weights over HTTP: one update at a time, whole or in parts; the old ones serve on until it is installed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from nano_inference.control import Control
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.rl.feed import Feed, Source
from nano_inference.types import (
    BadRequest,
    EngineDead,
    EnginePaused,
    OnRunning,
    UpdateBusy,
    UpdateState,
    WeightInfo,
    WeightLabel,
)
from nano_inference.updates import UpdateRules, WeightUpdate

WAY_OUT = (
    "end it with /finish_weight_update, or give it up with /abort_weight_update or /shutdown_weight_transfer_engine"
)
"""How a trainer gets rid of an open update that it, or another one, has left behind."""
_LOOK_S = 1.0
"""How often one looks again after the time of an update is up."""
_log = logging.getLogger("nano_inference.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """An update whose weights come in parts."""

    feed: Feed
    outcome: asyncio.Task[WeightInfo]


@dataclass(slots=True)
class _Way:
    """What became of an update that was begun; the engine's thread's own."""

    is_aborted: bool = False


class Updates:
    """Owns the update that is under way. On the event loop."""

    def __init__(
        self, link: EngineLink, engine: Callable[[], Control], timeout: float, shown: Callable[[str], str] = str
    ) -> None:
        """`shown` makes a failure's text one that a client may see."""
        self._link = link
        self._engine = engine
        self._timeout = timeout
        self._shown = shown
        self._way: _Way | None = None
        """The update that was begun last; the engine's thread's own."""
        self.receiving: list[str] = []
        """The groups from which tensors were told of that have not all come yet."""
        self._open: _Open | None = None
        self._failure = ""
        """What the last update in parts failed of, until its trainer asks for its end."""

    @property
    def is_open(self) -> bool:
        """Whether an update in parts was started and has not ended."""
        return self._open is not None

    @property
    def takes_parts(self) -> bool:
        """Whether what comes is meant as a part: also of an update that failed, whose trainer does not know it yet."""
        return self.is_open or bool(self._failure)

    async def install(
        self,
        source: Source,
        *,
        label: WeightLabel | None,
        checksum: str | None = None,
        on_running: OnRunning = "keep",
        partial: bool = False,
        group: str | None = None,
    ) -> WeightInfo:
        """Take all of a source, install it, return the version. Raises `ApiError`: 409 beside another update, else 400.

        With `partial`, tensors that do not come keep their values; `checksum` is what the whole must give;
        `group` is where the source receives.
        """
        try:
            found = await self._begin(source, label=label, checksum=checksum, on_running=on_running, partial=partial)
            with self._from(group):
                return await self._outcome(found)
        except Exception as error:
            raise self._refusal(error) from None

    async def start(self) -> WeightInfo:
        """Begin an update in parts; return the version that serves on. Raises `ApiError` 409 beside another update.

        It is given up when its end has not come in time.
        """
        feed = Feed()
        engine = self._engine()
        try:
            found = await self._begin(feed.pairs(), label=None, checksum=None, on_running="keep", partial=False)
        except Exception as error:
            raise self._refusal(error) from None
        self._failure = ""
        opened = _Open(feed=feed, outcome=asyncio.ensure_future(self._outcome(found)))
        opened.outcome.add_done_callback(lambda task: self._close(opened, task))
        self._open = opened
        return await self._link.call(engine.weight_info)

    async def add(self, source: Source, group: str | None = None) -> WeightInfo:
        """Take a part of the open update; return the version that serves on. A failure gives all of the update up.

        `group` is where the source receives.
        """
        opened = self.require_open()
        taken = opened.feed.put(source)
        either: set[asyncio.Future[Any]] = {taken, opened.outcome}
        with self._from(group):
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taken.done() or taken.cancelled():
            await self._told(opened)  # a part is given up only because all is
        return await self._link.call(self._engine().weight_info)

    @contextmanager
    def _from(self, group: str | None) -> Iterator[None]:
        """Note that a group is received from."""
        named = [] if group is None else [group]
        self.receiving += named
        try:
            yield
        finally:
            for name in named:
                self.receiving.remove(name)

    async def finish(self, label: WeightLabel | None, checksum: str | None = None) -> WeightInfo:
        """Install the open update under a name; return the version in force. Raises `ApiError` 400 with the reason.

        `checksum` is what the whole must give.
        """
        try:
            opened, engine = self.require_open(), self._engine()
        finally:
            self._open, self._failure = None, ""
        with suppress(BadRequest):  # it failed already, which the outcome tells
            if label is not None:
                await self._link.call(lambda: engine.label_weights(label, are_next=True))
            if checksum is not None:
                await self._link.call(lambda: engine.expect_checksum(checksum))
        opened.feed.end()
        try:
            return await self._told(opened)
        finally:
            self._failure = ""

    async def abort(self) -> bool:
        """Give up the update under way, whoever began it; whether there was one that was not installed yet.

        Whoever waits for it is told so at once. Its thread ends by itself: a broadcast cannot be called off.
        """
        opened, engine = self._open, self._engine()
        self._open, self._failure = None, ""

        def cancel() -> bool:
            if self._way is None or not engine.cancel_update():
                return False
            self._way.is_aborted = True
            return True

        was_under_way = await self._link.call(cancel)
        if opened is not None:
            opened.feed.give_up("the update was aborted")
            await asyncio.wait({opened.outcome})
        self._failure = ""
        return was_under_way

    async def _begin(
        self, source: Source, *, label: WeightLabel | None, checksum: str | None, on_running: OnRunning, partial: bool
    ) -> asyncio.Future[WeightInfo]:
        """Start the gathering; return the future of its end."""
        engine, way = self._engine(), _Way()
        update = WeightUpdate(
            weights=source,
            rules=UpdateRules(partial=partial, checksum=checksum),
            label=label,
            on_running=on_running,
            timeout=self._timeout,
            on_gathered=self._link.wake,
        )

        def begin() -> None:
            _require_idle(engine.weight_info().update, is_open=self.is_open)
            engine.start_update(update)
            self._way = way

        def look() -> WeightInfo | None:
            if way.is_aborted:
                raise ApiError(409, "the update was aborted", code="aborted")
            if engine.weight_info().update != "idle":
                return None
            engine.finish_update(0)
            return engine.weight_info()

        return await self._link.watch(look, first=begin)

    async def _outcome(self, found: asyncio.Future[WeightInfo]) -> WeightInfo:
        """Wait for an update's end; a source that has gone silent wakes nobody, so the clock does."""
        patience = self._timeout + 0.05
        try:
            while not found.done():
                await asyncio.wait({found}, timeout=patience)
                patience = min(patience, _LOOK_S)
                self._link.wake()
            return found.result()
        finally:
            found.cancel()

    async def _told(self, opened: _Open) -> WeightInfo:
        try:
            return await asyncio.shield(opened.outcome)
        except Exception as error:
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> ApiError:
        told = refusal(error)
        return ApiError(told.status, self._shown(told.message), param=told.param, code=told.code, headers=told.headers)

    def _close(self, opened: _Open, task: asyncio.Task[WeightInfo]) -> None:
        """Note how an update in parts ended; let its thread end, too."""
        if self._open is opened:
            self._open = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._shown(str(error))
            opened.feed.give_up("the update has failed")
            _log.warning("an update was given up, the old weights serve on: %s", error)

    def require_open(self) -> _Open:
        """Return the open update. Raises `ApiError` 400 when there is none, saying what became of the last one."""
        if self._open is not None:
            return self._open
        why = f" (the last one was given up: {self._failure})" if self._failure else ""
        raise ApiError(400, f"no update is open: POST /start_weight_update first{why}", code="no_update")


def _require_idle(state: UpdateState, *, is_open: bool) -> None:
    """Raise `UpdateBusy` unless no update is under way.

    One that has failed is under way until its own trainer was told so, which the turn that runs this does at its end: a
    new one in its place would have its result told to both.
    """
    if state == "failed":
        raise UpdateBusy("the last update has failed, and its trainer is only being told so; try again")
    if state != "idle":
        raise UpdateBusy(f"an update is {state}; {WAY_OUT if is_open else 'wait for its end'}")


def refusal(error: Exception) -> ApiError:
    """Return what a trainer is told of an update or a command that failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UpdateBusy):
        return ApiError(409, f"busy: {error}", code="busy")
    if isinstance(error, EnginePaused):
        return ApiError(409, str(error), code="asleep")
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
    if isinstance(error, ValueError):  # WeightError, ModelError, BadRequest
        return ApiError(400, str(error), code="bad_weights")
    if isinstance(error, OSError):
        return ApiError(400, f"the operating system refuses: {error.strerror or type(error).__name__}", code="os_error")
    _log.error("a trainer's command failed: %s: %s", type(error).__name__, error, exc_info=error)
    return ApiError(500, "internal server error", headers={"x-should-retry": "false"})
