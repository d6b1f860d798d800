"""`Copies`: a body that several replicas get at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Receive

from nano_inference.server.guard import ClientGone


class Copies:
    """Owns the pieces of a body that several readers get, at the speed of the slowest."""

    def __init__(self, receive: Receive, count: int) -> None:
        self.is_complete = False  # all readers have the last piece
        self._receive = receive
        self._queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(1) for _ in range(count)]

    async def fill(self) -> None:
        """Read the body to its end. Raises `ClientGone`."""
        piece: bytes | None = b""
        while piece is not None:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            is_last = not message.get("more_body", False)
            for piece in (message.get("body", b""), *((None,) if is_last else ())):
                for queue in self._queues:
                    await queue.put(piece)
        self.is_complete = True

    async def pieces(self, index: int) -> AsyncIterator[bytes]:
        while (piece := await self._queues[index].get()) is not None:
            yield piece
