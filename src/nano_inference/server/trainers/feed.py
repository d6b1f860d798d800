"""Queue for the weights of an update in parts: routes put sources in, the gathering thread reads their tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

from nano_inference.server.trainers.threads import call_in_loop
from nano_inference.types import WeightError

Source = Iterator[tuple[str, Any]]  # yields (name, tensor or file range)


class _Part(NamedTuple):
    source: Source
    loop: asyncio.AbstractEventLoop
    consumed: asyncio.Future[None]


class Feed:
    """Owns the queue. `pairs` is called on the gathering thread, the other methods on the event loop."""

    def __init__(self) -> None:
        self._parts: SimpleQueue[_Part | str | None] = SimpleQueue()
        """None ends the update; a text aborts it with that reason."""

    def put(self, source: Source) -> asyncio.Future[None]:
        """Add a source; return a future that is done once the source is consumed, or cancelled if it is not."""
        loop = asyncio.get_running_loop()
        part = _Part(source, loop, loop.create_future())
        self._parts.put(part)
        return part.consumed

    def end(self) -> None:
        """End the update: `pairs` stops after the sources put so far."""
        self._parts.put(None)

    def abort(self, reason: str) -> None:
        """Make `pairs` raise `WeightError` after the sources put so far."""
        self._parts.put(reason)

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """Yield the pairs of all sources. Raises `WeightError` if the update was aborted."""
        try:
            while (part := self._parts.get()) is not None:
                if isinstance(part, str):
                    raise WeightError(part)
                try:
                    # Closed at once if the reader stops early.
                    with closing(part.source) if isinstance(part.source, Generator) else nullcontext():
                        yield from part.source
                except BaseException:
                    _settle(part, is_consumed=False)
                    raise
                _settle(part, is_consumed=True)
        finally:
            while not self._parts.empty():
                if isinstance(part := self._parts.get(), _Part):
                    _settle(part, is_consumed=False)


def _settle(part: _Part, *, is_consumed: bool) -> None:
    """Complete or cancel a part's future on its event loop."""

    def settle() -> None:
        if part.consumed.done():
            return
        if is_consumed:
            part.consumed.set_result(None)
        else:
            part.consumed.cancel()

    call_in_loop(part.loop, settle)
