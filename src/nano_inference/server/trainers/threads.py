"""Daemon threads for blocking calls that cannot be cancelled; the process does not join them at exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

JOINING = "weight-joining"  # name of the threads that wait for a trainer
T = TypeVar("T")


async def in_thread(work: Callable[[], T], drop: Callable[[T], None], name: str = JOINING) -> T:
    """Return the result of `work`, or raise its exception; if the caller was cancelled, `drop` receives the result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
            call_in_loop(loop, lambda: None if done.done() else done.set_exception(failure))
        else:
            call_in_loop(loop, lambda: drop(result) if done.done() else done.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:
            drop(done.result())  # completed in the same iteration of the loop as the cancellation
        raise


def call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Schedule a callback on an event loop, from any thread; do nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
