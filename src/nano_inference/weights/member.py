"""One rank of a process group for weight updates: joining, and broadcasts from rank 0."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from threading import Event
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nano_inference.support.checks import check_int, check_number
from nano_inference.types import WeightError

GroupBackend = Literal["gloo", "nccl"]
_PROBE_S, _PAUSE_S = 2.0, 0.05
"""Timeout of one connection attempt to rank 0, and the pause between attempts, in seconds."""


class Member:
    """Owns one rank of a separate process group; torch's default group is not used.

    After a failure, `close` the group and create a new one.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: GroupBackend,
        timeout: float,
        prefix: str,
        given_up: Event | None = None,
        greeting: str = "",
    ) -> None:
        """Join the group at rank 0's `address` and `port`; wait at most `timeout` seconds for the other ranks.

        `prefix` is the key prefix in the store. `timeout` also limits every broadcast. Another thread may set
        `given_up` to cancel waiting for rank 0 to listen. Ranks with the same non-empty `greeting` detect each other
        (`_greeted`). Raises `ValueError` naming the field, `WeightError` if the group is not complete in time.
        """
        check_place(address, port, rank, world_size, timeout)
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be gloo or nccl, got {backend!r}")
        has_nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
        if not dist.is_available() or (backend == "nccl" and not has_nccl):
            raise ValueError(f"backend: {backend} is not available in this build of torch or on this machine")
        self.timeout = timedelta(seconds=timeout)  # longest duration of a broadcast; may be changed between two of them
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._is_broken = False
        self.is_receiving = False  # True while an update is received
        try:
            if given_up is not None and rank:
                await_host(address, port, timeout, given_up)
            meeting = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, world_size, is_master=rank == 0, timeout=self.timeout
            )
            store = dist.PrefixStore(prefix, meeting)  # type: ignore[attr-defined]
            if greeting:
                store.set(f"{greeting}{rank}", "")
            self._group: Any  # not registered globally
            if backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, rank, world_size, self.timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout
                self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
            # Every rank set its key before the group was complete.
            others = range(world_size) if greeting else ()
            self._greeted = frozenset(one for one in others if store.check([f"{greeting}{one}"]))
            """Ranks with the same greeting, this one included."""
        except (RuntimeError, ValueError) as error:
            raise WeightError(f"no weight group of {world_size} at {address}:{port}: {first_line(error)}") from error

    @property
    def device(self) -> torch.device:
        """Return the device of tensors that need not be copied for a broadcast."""
        return self._device

    def close(self) -> None:
        """Leave the group; a running broadcast ends when its data arrives or after the timeout. Can be called again."""
        if not self._is_broken and not self.is_receiving:
            self._group.shutdown()
        self._is_broken = True

    def broadcast(self, data: Tensor) -> Tensor:
        """Send `data` (rank 0) or receive into it; return the tensor. A failure closes the group permanently."""
        if self._is_broken:
            raise WeightError("the weight group is closed or has failed; join a new one")
        try:
            on_device = data.to(self._device)
            self._group.broadcast(on_device, 0).wait(self.timeout)
            return on_device if data.device == self._device else on_device.cpu()
        except RuntimeError as error:
            self._is_broken = True
            raise WeightError(f"the broadcast failed, the group is closed: {first_line(error)}") from error


def await_host(address: str, port: int, timeout: float, given_up: Event) -> None:
    """Wait until rank 0 accepts connections. Raises `WeightError` after `timeout` seconds or if `given_up` is set.

    torch's own wait cannot be cancelled: an abandoned member would later join in place of its replacement.
    """
    end = time.monotonic() + timeout
    while not given_up.is_set():
        try:
            with socket.create_connection((address, port), timeout=_PROBE_S):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise WeightError(f"no connection to rank 0: {error.strerror or type(error).__name__}") from None
        given_up.wait(_PAUSE_S)
    raise WeightError("the attempt was cancelled")


def check_place(address: object, port: object, rank: object, world_size: int, timeout: float) -> None:
    """Raise `ValueError` naming a field that cannot belong to a group."""
    if not isinstance(address, str) or not address:
        raise ValueError(f"address must be a host name or an IP address, got {address!r}")
    check_int("port", port, 1, 65535)
    check_int("world_size", world_size, 2)
    check_int("rank", rank, 0, world_size - 1)
    check_number("timeout", timeout, 0, 86400, open_low=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
