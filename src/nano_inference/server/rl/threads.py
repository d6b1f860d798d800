"""Waits that may be long and cannot be called off: each in a thread of its own, which nobody waits for at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

from nano_inference.server.guard import ClientGone

JOINING = "weight-joining"
"""The name of the threads that wait for a trainer."""
T = TypeVar("T")


async def in_thread(work: Callable[[], T], drop: Callable[[T], None], name: str = JOINING) -> T:
    """Return what `work` returns, or raise what it raises; `drop` takes what comes when nobody waits any more."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
            tell(loop, lambda: None if done.done() else done.set_exception(failure))
        else:
            tell(loop, lambda: drop(result) if done.done() else done.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:
            drop(done.result())  # it came in the same turn of the loop
        raise


async def unless_gone(receive: Receive, found: asyncio.Future[T]) -> T:
    """Return what a future gives; when the client leaves before, cancel it and raise `ClientGone`."""
    gone = asyncio.ensure_future(_gone(receive))
    try:
        either: set[asyncio.Future[Any]] = {gone, found}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise ClientGone
        return found.result()
    finally:
        gone.cancel()
        found.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def tell(loop: asyncio.AbstractEventLoop, news: Callable[[], None]) -> None:
    """Run something on an event loop, from whatever thread; nothing when it has gone."""
    with suppress(RuntimeError):  # the loop may have gone, and whoever waited with it
        loop.call_soon_threadsafe(news)
