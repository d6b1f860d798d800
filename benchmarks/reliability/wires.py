"""Connections to a server, which may misbehave, and what comes back on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]
WAIT_S = 600.0
"""Longest wait for anything; a check that needs it has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole HTTP reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        """The body, read."""
        return json.loads(self.body)


class Closed(Exception):
    """The server closed the connection."""


class Wire:
    """One connection to the server, with what clients may do wrong."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._method = "GET"

    @classmethod
    async def open(cls, port: int, receive_buffer: int | None = None) -> Wire:
        """Connect; `receive_buffer` bounds what the kernel takes for a client that does not read."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            limit = 1 << 16 if receive_buffer is None else 1024
            reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, path: str, body: object = None, headers: Iterable[str] = (), method: str = "") -> None:
        """Send a request with a JSON body (bytes are sent as they are), or with none."""
        self._method = method or ("GET" if body is None else "POST")
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{self._method} {path} HTTP/1.1", "host: 127.0.0.1", *headers]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(data)}"]
        await self.send("\r\n".join([*lines, "", ""]).encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read a status line and headers. Raises `Closed`."""
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed from error
        first, *lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def pieces(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises `Closed` when it ends before its time."""
        try:
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readuntil(b"\r\n")
            else:
                yield await self.reader.readexactly(int(headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed from error

    async def reply(self) -> Reply:
        """Read a whole reply. Raises `Closed`."""
        began = time.monotonic()
        status, headers = await self.head()
        parts = [] if self._method == "HEAD" else [piece async for piece in self.pieces(headers)]
        return Reply(status=status, headers=headers, body=b"".join(parts), seconds=time.monotonic() - began)

    async def events(self) -> AsyncIterator[JSON]:
        """Yield a stream's events: objects, and {"done": True} for the last. Raises `Closed`, `RuntimeError`."""
        status, headers = await self.head()
        if status != 200 or "event-stream" not in headers.get("content-type", ""):
            raise RuntimeError(f"no stream but status {status}")
        rest = b""
        async for piece in self.pieces(headers):
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    data = event.removeprefix(b"data: ")
                    yield {"done": True} if data == b"[DONE]" else json.loads(data)

    def close(self) -> None:
        """Close with FIN."""
        self.writer.close()

    def reset(self) -> None:
        """Close with RST."""
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


@dataclass(slots=True)
class Stream:
    """What one streamed request came to."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each event with tokens came."""
    finish_reason: str | None = None
    stop_reason: object = None
    error: JSON | None = None
    is_done: bool = False
    """[DONE] came."""
    is_cut: bool = False
    """The connection ended before that."""
    ended: float = 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between its events."""
        return [b - a for a, b in itertools.pairwise(self.times)]


def take_event(out: Stream, event: JSON) -> None:
    """Add an event to what a stream came to."""
    if event.get("done"):
        out.is_done = True
    elif "error" in event:
        out.error = event["error"]
    for choice in event.get("choices", ()):
        if choice.get("token_ids"):
            out.tokens += choice["token_ids"]
            out.times.append(time.monotonic())
        if choice.get("finish_reason"):
            out.finish_reason, out.stop_reason = choice["finish_reason"], choice.get("stop_reason")
