"""Weight updates over HTTP: one at a time, whole or in parts. Requests use the old weights until it is installed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.feed import Feed, Source
from nano_inference.server.translating import reworded
from nano_inference.types import (
    BadRequest,
    EngineDead,
    EnginePaused,
    OnRunning,
    UpdateBusy,
    UpdateCancelled,
    WeightInfo,
    WeightLabel,
)
from nano_inference.weights.updates import WeightUpdate

HOW_TO_END = (
    "end it with /finish_weight_update, or abort it with /abort_weight_update or /shutdown_weight_transfer_engine"
)
"""Advice in errors about an open update."""
HOW_TO_COMMIT = "install it with /commit_weight_update, or abort it with /abort_weight_update"
_log = logging.getLogger("nano_inference.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenUpdate:
    """An update in parts."""

    feed: Feed
    outcome: asyncio.Future[WeightInfo]


class Updates:
    """Owns the current update. Accessed on the event loop."""

    def __init__(self, link: EngineLink, timeout: float, redact: Callable[[str], str] = str) -> None:
        """`timeout` is in seconds; `redact` removes from an error's text what clients must not see."""
        self._link = link
        self._timeout = timeout
        self._redact = redact
        self._holds = False
        """Whether the latest update waits for `commit` once it is gathered."""
        self.receiving: list[str] = []  # groups with tensors still to be received
        self._open: _OpenUpdate | None = None
        self._failure = ""
        """Why the latest update in parts failed; cleared when its trainer finishes it or another update starts."""

    @property
    def is_open(self) -> bool:
        """True while an update in parts has started and not ended."""
        return self._open is not None

    @property
    def takes_parts(self) -> bool:
        """True if new weights are a part of an update: also after it failed, which its trainer may not know yet."""
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
        """Read a source to its end, install the weights and return their version.

        `partial`: weights that the source lacks keep their values; `checksum`: expected checksum of all weights;
        `group`: the group that the source receives from. Raises `ApiError`: 409 during another update, else 400.
        """
        try:
            outcome = await self._start(
                WeightUpdate(weights=source, label=label, checksum=checksum, on_running=on_running, partial=partial)
            )
            with self._receiving_from(group):
                return await outcome
        except Exception as error:
            raise self._client_error(error) from None

    async def hold(self, update: WeightUpdate) -> int:
        """Read an update to its end and hold its weights until `commit`; return the version that they will get.

        Raises `ApiError` as `install` does.
        """
        try:
            outcome = await self._start(replace(update, hold=True))
            return (await outcome).version + 1
        except Exception as error:
            raise self._client_error(error) from None

    async def commit(self) -> WeightInfo:
        """Install the held weights; return their version. Raises `ApiError` 400 if there are none."""
        try:
            if not self._holds or await self._link.engine.call(lambda engine: engine.weight_info().update) != "staged":
                raise ApiError(400, "no weights are held: POST /update_weights with hold first", code="no_update")
            self._holds = False
            await self._link.engine.commit_update()
            return await self._link.engine.call(lambda engine: engine.weight_info())
        except Exception as error:
            raise self._client_error(error) from None

    async def start(self) -> WeightInfo:
        """Start an update in parts; return the current version. Raises `ApiError` 409 during another update.

        The update is aborted if `finish` is not called within the timeout.
        """
        feed = Feed()
        try:
            outcome = await self._start(WeightUpdate(weights=feed.pairs()))
        except Exception as error:
            raise self._client_error(error) from None
        self._failure = ""
        opened = _OpenUpdate(feed=feed, outcome=outcome)
        outcome.add_done_callback(lambda _: self._close(opened))
        self._open = opened
        return await self._link.engine.call(lambda engine: engine.weight_info())

    async def add(self, source: Source, group: str | None = None) -> WeightInfo:
        """Add a part to the open update and wait until it is read; return the current version.

        `group`: the group that the source receives from. Raises `ApiError` if the update fails.
        """
        opened = self.require_open()
        consumed = opened.feed.put(source)
        either: set[asyncio.Future[Any]] = {consumed, opened.outcome}
        with self._receiving_from(group):
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not consumed.done() or consumed.cancelled():
            await self._result(opened)  # a part fails only if the update does
        return await self._link.engine.call(lambda engine: engine.weight_info())

    @contextmanager
    def _receiving_from(self, group: str | None) -> Iterator[None]:
        names = [] if group is None else [group]
        self.receiving += names
        try:
            yield
        finally:
            for name in names:
                self.receiving.remove(name)

    async def finish(self, label: WeightLabel | None, checksum: str | None = None) -> WeightInfo:
        """Install the open update with a label; return the new version. Raises `ApiError` 400 with the reason.

        `checksum`: expected checksum of all weights.
        """
        try:
            opened = self.require_open()
        finally:
            self._open, self._failure = None, ""
        with suppress(BadRequest):  # the update has failed already; its outcome has the reason
            if label is not None:
                await self._link.engine.call(lambda engine: engine.label_weights(label, are_next=True))
            if checksum is not None:
                await self._link.engine.call(lambda engine: engine.expect_checksum(checksum))
        opened.feed.end()
        try:
            return await self._result(opened)
        finally:
            self._failure = ""

    async def abort(self) -> bool:
        """Abort the current update of any client; return False if there is none or it is already installed.

        Its waiters get their error at once. Its thread ends later by itself: a broadcast cannot be cancelled.
        """
        opened = self._open
        self._open, self._failure = None, ""

        was_running = await self._link.engine.cancel_update()
        if opened is not None:
            opened.feed.abort("the update was aborted")
            await asyncio.wait({opened.outcome})
        self._failure = ""
        return was_running

    async def _start(self, update: WeightUpdate) -> asyncio.Future[WeightInfo]:
        """Start gathering; return the future of the installed version, with `hold` set once they are gathered."""
        try:
            outcome = await self._link.engine.start_update(replace(update, timeout=self._timeout))
        except UpdateBusy as error:
            how = HOW_TO_END if self.is_open else HOW_TO_COMMIT if self._holds else "wait for its end"
            raise UpdateBusy(f"{str(error).partition(';')[0]}; {how}") from None
        self._holds = update.hold
        return outcome

    async def _result(self, opened: _OpenUpdate) -> WeightInfo:
        try:
            return await asyncio.shield(opened.outcome)
        except Exception as error:
            raise self._client_error(error) from None

    def _client_error(self, error: Exception) -> ApiError:
        return reworded(client_error(error), self._redact)

    def _close(self, opened: _OpenUpdate) -> None:
        """Record how an update in parts ended, and end its thread."""
        if self._open is opened:
            self._open = None
        error = None if opened.outcome.cancelled() else opened.outcome.exception()
        if error is not None:
            self._failure = self._redact(str(error))
            opened.feed.abort("the update has failed")
            _log.warning("a weight update failed, the old weights remain in use: %s", error)

    def require_open(self) -> _OpenUpdate:
        """Return the open update. Raises `ApiError` 400 if there is none, with the failure of the latest one."""
        if self._open is not None:
            return self._open
        why = f" (the latest one failed: {self._failure})" if self._failure else ""
        raise ApiError(400, f"no update is open: POST /start_weight_update first{why}", code="no_update")


def client_error(error: Exception) -> ApiError:
    """Return the reply to a command or an update that failed; log unexpected errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UpdateBusy):
        return ApiError(409, f"busy: {error}", code="busy")
    if isinstance(error, UpdateCancelled):
        return ApiError(409, "the update was aborted", code="aborted")
    if isinstance(error, EnginePaused):
        return ApiError(409, str(error), code="asleep")
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
    if isinstance(error, ValueError):  # WeightError, ModelError, BadRequest
        return ApiError(400, str(error), code="bad_weights")
    if isinstance(error, OSError):
        text = f"the operating system reports: {error.strerror or type(error).__name__}"
        return ApiError(400, text, code="os_error")
    _log.error("a trainer's command failed: %s: %s", type(error).__name__, error, exc_info=error)
    return ApiError(500, "internal server error", headers={"x-should-retry": "false"})
