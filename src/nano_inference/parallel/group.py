"""`Group`: collective operations among the ranks of one engine.

Shapes: T ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nano_inference.types import EngineDead

_FIRST_BYTES = 2048  # bytes of the broadcast with which a message starts; a longer message needs a second one
_HEADER = 8
_TEXT_BYTES = 1024


class Group:
    """Owns one rank's process group. Every rank calls the same methods in the same order.

    After an `EngineDead` the group is unusable: some ranks may have left an operation that others still wait in.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        idle: timedelta | None = None,
        is_registered: bool = False,
    ) -> None:
        """`group` is a torch process group, used from one thread; `timeout` limits every operation.

        `idle` limits the wait of `next_message` for the start of a message, by default `timeout`. `is_registered`:
        torch keeps a reference to the group, as to all results of `new_group`.
        """
        self._is_registered = is_registered
        self.rank, self.size = rank, size
        self._group, self._timeout, self._idle = group, timeout, idle or timeout
        self.bytes_sent = 0  # bytes of all messages that rank 0 has broadcast
        self.tensor_bytes = 0  # bytes of all tensors that this rank has contributed to `add` and `gather`

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, with the same bits on each. May overwrite `x`."""
        x = x.contiguous()
        self.tensor_bytes += x.nbytes
        self._wait(lambda: self._group.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors of one shape, [T, …]."""
        x = x.contiguous()
        self.tensor_bytes += x.nbytes
        found = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([found], [x]))
        return torch.stack(found)

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor to one rank."""
        x = x.contiguous()
        self._wait(lambda: self._group.send([x], rank, 0))

    def receive(self, x: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with one that a rank sends."""
        self._wait(lambda: self._group.recv([x], rank, 0))

    def broadcast(self, message: bytes) -> None:
        """Send a message to all other ranks, which call `next_message`. Only on rank 0."""
        data = len(message).to_bytes(_HEADER, "little") + message
        first = bytearray(data[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
        self._broadcast(torch.frombuffer(first, dtype=torch.uint8))
        if len(data) > _FIRST_BYTES:
            self._broadcast(torch.frombuffer(bytearray(data[_FIRST_BYTES:]), dtype=torch.uint8))
        self.bytes_sent += max(len(data), _FIRST_BYTES)

    def next_message(self) -> bytes:
        """Return rank 0's next message."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._broadcast(first, self._idle)
        data = bytes(first.numpy().data)
        size = int.from_bytes(data[:_HEADER], "little")
        message = data[_HEADER : _HEADER + size]
        if len(message) == size:
            return message
        rest = torch.empty(size - len(message), dtype=torch.uint8)
        self._broadcast(rest)
        return message + bytes(rest.numpy().data)

    def exchange(self, text: str) -> list[str]:
        """Return the ranks' texts, cut off after `_TEXT_BYTES` bytes."""
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        found = self.gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [bytes(one.numpy().data).rstrip(b"\0").decode(errors="replace") for one in found]

    def close(self) -> None:
        """Leave the group; other ranks that wait for this one get an error. Can be called again."""
        group, self._group = self._group, None  # Gloo closes its connections with the last reference
        if group is not None and self._is_registered:
            dist.destroy_process_group(group)

    def _broadcast(self, x: Tensor, timeout: timedelta | None = None) -> None:
        options = dist.BroadcastOptions()
        options.timeout = timeout or self._timeout
        self._wait(lambda: self._group.broadcast([x], options), options.timeout)

    def _wait(self, start: Any, timeout: timedelta | None = None) -> None:
        """Start an operation and wait for its end. Raises `EngineDead` if a rank is gone or too slow."""
        if self._group is None:
            raise EngineDead(f"rank {self.rank} of {self.size} has left the engine")
        try:
            start().wait(timeout or self._timeout)
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EngineDead(f"rank {self.rank} of {self.size} lost another rank: {reason}") from error
