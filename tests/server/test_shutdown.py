"""`Shutdown`: what signals request, and work that they end."""

from __future__ import annotations

import asyncio

import pytest

from nano_inference.server.run import Shutdown


def test_the_second_signal_forces_a_shutdown() -> None:
    async def work() -> None:
        shutdown = Shutdown()
        for forced in (False, True):
            shutdown.on_signal()
            assert (shutdown.requested.is_set(), shutdown.forced.is_set()) == (True, forced)

    asyncio.run(work())


def test_a_signal_ends_work_that_has_not_ended_before() -> None:
    async def fail() -> None:
        raise OSError("no model")

    async def work() -> None:
        shutdown = Shutdown()
        assert await shutdown.comes_after(asyncio.sleep(0)) is True
        with pytest.raises(OSError, match="no model"):
            await shutdown.comes_after(fail())
        endless = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(shutdown.on_signal)
        assert await shutdown.comes_after(endless) is False
        with pytest.raises(asyncio.CancelledError):
            await endless

    asyncio.run(work())
