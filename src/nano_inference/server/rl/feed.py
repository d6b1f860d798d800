"""The weights of one update that come in parts: routes put sources in, the thread that gathers takes them out."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from nano_inference.server.rl.threads import tell
from nano_inference.types import WeightError

Source = Iterator[tuple[str, Any]]
"""Names, and tensors or ranges of files."""


class _Part(NamedTuple):
    source: Source
    loop: asyncio.AbstractEventLoop
    taken: asyncio.Future[None]


class Feed:
    """Owns the queue between the routes and the thread. `pairs` is the thread's; all else is the event loop's."""

    def __init__(self) -> None:
        self._parts: SimpleQueue[_Part | str | None] = SimpleQueue()
        """None ends the update, a text gives it up."""

    def put(self, source: Source) -> asyncio.Future[None]:
        """Add a source; the future is done when all of it was taken, and cancelled when it was not."""
        loop = asyncio.get_running_loop()
        part = _Part(source, loop, loop.create_future())
        self._parts.put(part)
        return part.taken

    def end(self) -> None:
        """Say that nothing more comes."""
        self._parts.put(None)

    def give_up(self, reason: str) -> None:
        """Let the update fail where it waits for more."""
        self._parts.put(reason)

    def pairs(self) -> Iterator[tuple[str, Any]]:
        """Yield what the sources give. Raises `WeightError` when the update was given up."""
        try:
            while (part := self._parts.get()) is not None:
                if isinstance(part, str):
                    raise WeightError(part)
                try:
                    yield from _closed(part.source)
                except BaseException:
                    _settle(part, is_taken=False)
                    raise
                _settle(part, is_taken=True)
        finally:
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        while True:
            try:
                part = self._parts.get_nowait()
            except Empty:
                return
            if isinstance(part, _Part):
                _settle(part, is_taken=False)


def _closed(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield a source's pairs; when the reader stops early the source is closed now, not when it is collected."""
    if isinstance(source, Generator):
        with closing(source):
            yield from source
    else:
        yield from source


def _settle(part: _Part, *, is_taken: bool) -> None:
    """Tell whoever put a source in whether it was taken."""

    def settle() -> None:
        if part.taken.done():
            return
        if is_taken:
            part.taken.set_result(None)
        else:
            part.taken.cancel()

    tell(part.loop, settle)
