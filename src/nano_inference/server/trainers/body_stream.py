"""Weights in the body of a request: a safetensors file that is read while it arrives, one tensor at a time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.types import Receive

from nano_inference.server.trainers.threads import call_in_loop
from nano_inference.types import ModelError, WeightError

_MAX_BUFFERED = 8 << 20  # bytes that wait for the gathering thread; the client is slowed down beyond them
_ORIGIN = Path("body")


class BodyStream:
    """Owns the bytes between the event loop (`receive_all`) and the gathering thread (`read`, `read_into`)."""

    def __init__(self) -> None:
        """Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._has_room = asyncio.Event()
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._num_buffered = 0
        self._end: str | None = None  # why no more bytes come: "" after the whole body

    async def receive_all(self, receive: Receive) -> None:
        """Pass the body's bytes on until its end, or until the client disconnects."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.end("the client disconnected before the end of the body")
                return
            with self._changed:
                self._chunks.append(message.get("body", b""))
                self._num_buffered += len(self._chunks[-1])
                if self._num_buffered > _MAX_BUFFERED:
                    self._has_room.clear()
                else:
                    self._has_room.set()
                self._changed.notify()
            if not message.get("more_body", False):
                self.end("")
                return
            await self._has_room.wait()

    def end(self, reason: str) -> None:
        """Make `read` raise `WeightError` with the reason after the bytes so far, unless the stream has ended."""
        with self._changed:
            self._end = reason if self._end is None else self._end
            self._changed.notify()

    def read(self, num_bytes: int) -> bytearray:
        """Return this many bytes. Raises `WeightError` if the body ends before."""
        found = bytearray(num_bytes)
        self.read_into(memoryview(found))
        return found

    def read_into(self, target: memoryview) -> None:
        """Fill a buffer of bytes. Raises `WeightError` if the body ends before."""
        start = 0
        while start < len(target):
            chunk = self._next(len(target) - start)
            if not chunk:
                missing = len(target) - start
                raise WeightError(self._end or f"the body ended {missing} bytes before the end of a tensor or header")
            target[start : start + len(chunk)] = chunk
            start += len(chunk)

    def is_at_end(self) -> bool:
        """Wait for a byte or the end; return whether the whole body was read."""
        return not self._next(1) and self._end == ""

    def _next(self, most: int) -> bytes:
        """Return the next bytes, at most this many; none at the end."""
        with self._changed:
            while not self._num_buffered and self._end is None:
                self._changed.wait()
            while self._chunks and not self._chunks[0]:
                self._chunks.popleft()
            if not self._chunks:
                return b""
            chunk = self._chunks.popleft()
            if len(chunk) > most:
                self._chunks.appendleft(chunk[most:])
                chunk = chunk[:most]
            self._num_buffered -= len(chunk)
            is_low = self._num_buffered <= _MAX_BUFFERED
        if is_low:
            call_in_loop(self._loop, self._has_room.set)
        return chunk


def weights_in_body(stream: BodyStream, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of a safetensors file as it arrives; `shapes`: the model's weights.

    Raises `WeightError` for a damaged file, and before any tensor for one whose weights are not the model's, which
    bounds its size.
    """
    import torch

    from nano_inference.loading.pieces import DTYPES
    from nano_inference.loading.safetensors_file import MAX_HEADER_BYTES, header_ranges, num_bytes

    length = int.from_bytes(stream.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise WeightError(f"body: a header of {length} bytes (limit {MAX_HEADER_BYTES})")
    try:
        ranges = header_ranges(_ORIGIN, bytes(stream.read(length)), 8 + length)
    except ModelError as error:
        raise WeightError(str(error)) from None
    for name, part in ranges.items():
        if name not in shapes:
            raise WeightError(f"{name[:200]}: the model has no such tensor")
        if part.shape != shapes[name]:
            raise WeightError(f"{name}: shape {list(part.shape)}, the model's is {list(shapes[name])}")
    for name, part in ranges.items():
        data = torch.empty(num_bytes(part), dtype=torch.uint8)
        stream.read_into(data.numpy().data)
        yield name, data.view(DTYPES[part.dtype]).view(part.shape)
    if not stream.is_at_end():
        raise WeightError("body: bytes follow the last tensor")
