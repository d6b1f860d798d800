"""Weights in the body of a request: a safetensors file that is read while it arrives, one tensor at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from starlette.types import Receive

from nano_inference.models.names import WeightShapes
from nano_inference.types import ModelError, WeightError

_ORIGIN = Path("body")
_BATCH = 1 << 20  # bytes that the thread asks for at once


class BodyStream:
    """Reads a request's body on the gathering thread, which asks the event loop for its messages.

    The client is slowed down as far as the thread is slow.
    """

    def __init__(self, receive: Receive) -> None:
        """Call it on the event loop."""
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None  # waits for the next message
        self._has_ended = False
        self._rest = memoryview(b"")  # received, but not read
        self._is_complete = False  # no message follows

    def end(self) -> None:
        """Make the thread's waiting and further reads raise `WeightError`. Call it on the event loop."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()

    async def _next(self) -> tuple[bytearray, bool]:
        """Return the bytes of the next messages, about `_BATCH`, and whether the body is complete."""
        if self._has_ended:
            raise WeightError("the update has ended")
        self._task = asyncio.current_task()
        found, is_complete = bytearray(), False
        while len(found) < _BATCH and not is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise WeightError("the client disconnected before the end of the body")
            found += message.get("body", b"")
            is_complete = not message.get("more_body", False)
        return found, is_complete

    def _has_more(self) -> bool:
        """Wait for a byte or the end; return whether there is a byte. Raises `WeightError` if the client leaves."""
        while not self._rest and not self._is_complete:
            try:
                data, self._is_complete = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
            except CancelledError:  # by `end`
                raise WeightError("the update has ended") from None
            self._rest = memoryview(data)
        return bool(self._rest)

    def read_into(self, target: memoryview) -> None:
        """Fill a buffer of bytes. Raises `WeightError` if the body ends before."""
        start = 0
        while start < len(target):
            if not self._has_more():
                missing = len(target) - start
                raise WeightError(f"the body ended {missing} bytes before the end of a tensor or header")
            chunk = self._rest[: len(target) - start]
            target[start : start + len(chunk)] = chunk
            start += len(chunk)
            self._rest = self._rest[len(chunk) :]

    def _skip(self, count: int) -> None:
        """Read and drop bytes. Raises as `read_into`."""
        piece = memoryview(bytearray(min(count, _BATCH)))
        while count:
            self.read_into(piece[:count])
            count -= min(count, len(piece))

    def weights(self, shapes: WeightShapes) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of a safetensors file as it arrives; `shapes`: the model's weights.

        Raises `WeightError` for a damaged file, and before any tensor for one whose weights are not the model's, which
        bounds its size.
        """
        import torch

        from nano_inference.loading.pieces import DTYPES
        from nano_inference.loading.safetensors_file import MAX_HEADER_BYTES, header_ranges, num_bytes

        start = bytearray(8)
        self.read_into(memoryview(start))
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise WeightError(f"body: a header of {length} bytes (limit {MAX_HEADER_BYTES})")
        header = bytearray(length)
        self.read_into(memoryview(header))
        try:
            ranges = header_ranges(_ORIGIN, bytes(header), 8 + length)
        except ModelError as error:
            raise WeightError(str(error)) from None
        for name, part in ranges.items():
            if (fault := shapes.fault(name, part.shape)) is not None:
                raise WeightError(fault)
        for name, part in ranges.items():
            if shapes.names.own(name) is None:
                self._skip(num_bytes(part))
                continue
            data = torch.empty(num_bytes(part), dtype=torch.uint8)
            self.read_into(data.numpy().data)
            yield name, data.view(DTYPES[part.dtype]).view(part.shape)
        if self._has_more():
            raise WeightError("body: bytes follow the last tensor")
