"""A WebSocket's connection with a limit on the time for which the client does not read; needs the package wsproto."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from uvicorn.server import ServerState


class LimitedSocket(WSProtocol):
    """One WebSocket. Owns the timer that runs while the client does not read; its end aborts the connection."""

    def __init__(
        self,
        write_timeout: float,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._write_timeout = write_timeout
        self._write_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timer."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and end a wait for the client to read."""
        super().connection_lost(exc)
        self._stop_timer()
        self.writable.set()

    def _stop_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
