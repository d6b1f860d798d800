"""Weight updates over HTTP: one at a time, whole or in parts. Requests use the old weights until it is installed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.types import BadRequest, UpdateBusy, WeightError, WeightInfo, WeightLabel
from nano_inference.weights.updates import WeightUpdate

HOW_TO_END = (
    "end it with /finish_weight_update, or abort it with /abort_weight_update or /shutdown_weight_transfer_engine"
)
"""Advice in errors about an open update."""
_HOW_TO_COMMIT = "install it with /commit_weight_update, or abort it with /abort_weight_update"
_log = logging.getLogger("nano_inference.server")

Source = Iterator[tuple[str, Any]]  # yields (name, tensor or file range)


class Feed:
    """Queue for the weights of an update in parts. `pairs` runs on the gathering thread, the rest on the event loop."""

    def __init__(self) -> None:
        self._parts: SimpleQueue[tuple[Source, Future[bool]] | str | None] = SimpleQueue()
        """Sources with whether they were consumed; None ends the update; a text aborts it with that reason."""

    def put(self, source: Source) -> asyncio.Future[bool]:
        consumed: Future[bool] = Future()
        self._parts.put((source, consumed))
        return asyncio.wrap_future(consumed)

    def end(self) -> None:
        """End the update: `pairs` stops after the sources put so far."""
        self._parts.put(None)

    def abort(self, reason: str) -> None:
        """Make `pairs` raise `WeightError` after the sources put so far."""
        self._parts.put(reason)

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """Yield the pairs of all sources. Raises `WeightError` if the update was aborted."""
        consumed: Future[bool] | None = None
        try:
            while (part := self._parts.get()) is not None:
                if isinstance(part, str):
                    raise WeightError(part)
                source, consumed = part
                # Closed at once if the reader stops early.
                with closing(source) if isinstance(source, Generator) else nullcontext():
                    yield from source
                _settle(consumed, True)
                consumed = None
        finally:
            if consumed is not None:
                _settle(consumed, False)
            while not self._parts.empty():
                if isinstance(part := self._parts.get(), tuple):
                    _settle(part[1], False)


def _settle(consumed: Future[bool], value: bool) -> None:
    if consumed.set_running_or_notify_cancel():  # its caller may have left
        consumed.set_result(value)


@dataclass(frozen=True, slots=True)
class UpdateInParts:
    """An update in progress whose weights come from a feed."""

    feed: Feed
    outcome: asyncio.Future[WeightInfo]

    async def add(self, source: Source) -> None:
        """Add a part; return when its tensors are gathered. Raises what the update raised."""
        consumed = self.feed.put(source)
        either: set[asyncio.Future[Any]] = {consumed, self.outcome}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not consumed.done() or not consumed.result():
            await asyncio.shield(self.outcome)  # a part fails only if the update does
            raise WeightError("the update ended before these tensors")

    async def finish(self) -> WeightInfo:
        """Install what was added; return its version. Raises `WeightError`; then the old weights stay."""
        self.feed.end()
        return await asyncio.shield(self.outcome)

    async def abort(self, reason: str) -> None:
        """End the update without installing it; return once it has ended."""
        self.feed.abort(reason)
        await asyncio.wait({self.outcome})
        if not self.outcome.cancelled():
            self.outcome.exception()  # known to the caller: not to be logged as never retrieved


class Updates:
    """Owns the current update in parts. Accessed on the event loop."""

    def __init__(self, link: EngineLink, timeout: float) -> None:
        """`timeout`: most seconds from the start of an update to its last tensor."""
        self._link = link
        self._timeout = timeout
        self._open: UpdateInParts | None = None
        self._holds = False  # True if the latest update is held for `commit`
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

    async def install(self, update: WeightUpdate) -> WeightInfo:
        """Read an update to its end and install it; with its `hold`, return what is installed until `commit`.

        Raises `UpdateBusy` during another update, `WeightError`.
        """
        return await (await self._started(update))

    async def commit(self, version: int | None = None) -> WeightInfo:
        """Install the held weights, as `version`; return it. Raises `ApiError` 400 if there are none, `BadRequest`."""
        engine = self._link.engine
        if not self._holds or await engine.call(lambda engine: engine.weight_info().update) != "staged":
            raise ApiError(400, "no weights are held: POST /update_weights with hold first", code="no_update")
        await engine.commit_update(version=version)
        self._holds = False
        return await engine.call(lambda engine: engine.weight_info())

    async def start(self) -> None:
        """Start an update in parts, which is aborted if it is not finished in time. Raises `UpdateBusy`."""
        feed = Feed()
        opened = UpdateInParts(feed, await self._started(WeightUpdate(weights=feed.pairs())))
        self._failure = ""
        self._open = opened
        opened.outcome.add_done_callback(lambda _: self._close(opened))

    def require_open(self) -> UpdateInParts:
        """Return the open update. Raises `ApiError` 400 if there is none, with the failure of the latest one."""
        if self._open is not None:
            return self._open
        why = f" (the latest one failed: {self._failure})" if self._failure else ""
        raise ApiError(400, f"no update is open: POST /start_weight_update first{why}", code="no_update")

    async def finish(self, label: WeightLabel | None, checksum: str | None) -> WeightInfo:
        """Install the open update; return its version. Raises `ApiError` 400, `WeightError`."""
        try:
            opened = self.require_open()
        finally:
            self._open, self._failure = None, ""
        with suppress(BadRequest):  # the update has failed already; its outcome has the reason
            if label is not None:
                await self._link.engine.call(lambda engine: engine.label_weights(label, are_next=True))
            if checksum is not None:
                await self._link.engine.call(lambda engine: engine.expect_checksum(checksum))
        try:
            return await opened.finish()
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
            await opened.abort("the update was aborted")
        self._failure = ""
        return was_running

    async def _started(self, update: WeightUpdate) -> asyncio.Future[WeightInfo]:
        """Start gathering; return the future of the installed version. Raises `UpdateBusy` with what ends the other."""
        try:
            outcome = await self._link.engine.start_update(replace(update, timeout=self._timeout))
        except UpdateBusy as error:
            how = HOW_TO_END if self.is_open else _HOW_TO_COMMIT if self._holds else "wait for its end"
            raise UpdateBusy(f"{str(error).partition(';')[0]}; {how}") from None
        self._holds = update.hold
        return outcome

    def _close(self, opened: UpdateInParts) -> None:
        """Record how an update in parts ended, and end its thread."""
        if self._open is opened:
            self._open = None
        error = None if opened.outcome.cancelled() else opened.outcome.exception()
        if error is not None:
            self._failure = str(error)
            opened.feed.abort("the update has failed")
            _log.warning("a weight update failed, the old weights remain in use: %s", error)
