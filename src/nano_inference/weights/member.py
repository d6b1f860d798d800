"""One rank of a process group for weight updates: what rank 0 announces, and the receiving of its broadcasts.

A `Member` has a channel, which transports the broadcasts: one of torch's process groups (`TorchChannel`), or NCCL alone
(`nccl.Communicator`) for trainers that do not use torch's.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nano_inference.loading.pieces import DTYPES
from nano_inference.models.names import WeightShapes
from nano_inference.support.checks import check_int, check_number
from nano_inference.support.memory import huge_empty
from nano_inference.types import WeightError

GroupBackend = Literal["gloo", "nccl"]
Shapes = Mapping[str, tuple[int, ...]]  # names and shapes of a model's weights
Receiver = Callable[[], list[tuple[str, Tensor]]]  # receives one broadcast and returns its tensors
_MAX_TENSOR_BYTES = 1 << 40
_PROBE_S, _PAUSE_S = 2.0, 0.05
"""Timeout of one connection attempt to rank 0, and the pause between attempts, in seconds."""
_log = logging.getLogger(__name__)


class PlainSpec(NamedTuple):
    """A tensor as announced before its broadcast."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def form(self) -> str:
        """Return dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)}"


def plain_specs(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], dtypes_field: str = "dtypes"
) -> tuple[PlainSpec, ...]:
    """Return the tensors that three parallel lists describe. Raises `ValueError` naming the list that is invalid."""
    for field, values in ((dtypes_field, dtypes), ("shapes", shapes)):
        if len(values) != len(names):
            raise ValueError(f"{field} must have one entry for each of {len(names)} names, has {len(values)}")
    specs = []
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        known = dtype.removeprefix("torch.")
        if known not in DTYPES:
            raise ValueError(f"{dtypes_field}[{index}] must be one of {', '.join(DTYPES)}, got {dtype[:64]!r}")
        if math.prod(shape) * DTYPES[known].itemsize > _MAX_TENSOR_BYTES:
            raise ValueError(f"shapes[{index}] takes more than {_MAX_TENSOR_BYTES} bytes")
        specs.append(PlainSpec(name, known, tuple(shape)))
    return tuple(specs)


def misfits(specs: Sequence[PlainSpec], own: WeightShapes) -> list[str]:
    """Return a message for each announced tensor whose name or shape differs from the model's weights."""
    return [fault for spec in specs if (fault := own.fault(spec.name, spec.shape)) is not None]


def buckets(specs: Sequence[PlainSpec], limit: int) -> list[list[PlainSpec]]:
    """Return the tensors of each packed broadcast, which ends with the tensor that makes it larger than `limit` bytes.

    The rule of vLLM's distributed/weight_transfer/packed_tensor.py (00a9ccf).
    """
    found: list[list[PlainSpec]] = []
    size = limit + 1
    for spec in specs:
        if size > limit:
            found.append([])
            size = 0
        found[-1].append(spec)
        size += spec.num_bytes
    return found


def unpacked(buffer: Tensor, specs: Sequence[PlainSpec]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a bucket of bytes; copies where they are not aligned in it."""
    found, end = [], 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        dtype = DTYPES[spec.dtype]
        values = buffer[start:end].clone() if start % dtype.itemsize else buffer[start:end]
        found.append((spec.name, values.view(dtype).view(spec.shape)))
    return found


class Channel(Protocol):
    """Transports the broadcasts of rank 0."""

    device: torch.device  # of the tensors

    def broadcast(self, data: Tensor) -> None:
        """Send a tensor, or receive into it. Raises `WeightError`; then no further broadcast is possible."""

    def close(self, *, is_receiving: bool) -> None:
        """Leave the group; `is_receiving`: another thread may be in `broadcast`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group meets, and as which rank. Raises `ValueError` naming an invalid field."""

    address: str  # rank 0's
    port: int
    rank: int
    world_size: int
    timeout: float = 300.0  # most seconds of waiting for the other ranks
    given_up: Event | None = None  # set by another thread to cancel waiting for rank 0

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise ValueError(f"address must be a host name or an IP address, got {self.address!r}")
        check_int("port", self.port, 1, 65535)
        check_int("world_size", self.world_size, 2)
        check_int("rank", self.rank, 0, self.world_size - 1)
        check_number("timeout", self.timeout, 0, 86400, open_low=True)

    def await_host(self) -> None:
        """Wait until rank 0 accepts connections. Raises `WeightError` after the timeout or if `given_up` is set.

        torch's own wait cannot be cancelled: an abandoned member would later join in place of its replacement.
        """
        given_up, end = self.given_up or Event(), time.monotonic() + self.timeout
        while not given_up.is_set():
            try:
                with socket.create_connection((self.address, self.port), timeout=_PROBE_S):
                    return
            except OSError as error:
                if time.monotonic() > end:
                    raise WeightError(f"no connection to rank 0: {error.strerror or type(error).__name__}") from None
            given_up.wait(_PAUSE_S)
        raise WeightError("the attempt was cancelled")

    def store(self) -> Any:
        """Return the store of the group, which rank 0 hosts. Raises what torch raises."""
        return dist.TCPStore(  # type: ignore[attr-defined]
            *(self.address, self.port, self.world_size),
            is_master=self.rank == 0,
            timeout=timedelta(seconds=self.timeout),
        )

    def failed(self, error: Exception) -> WeightError:
        """Return the error of a group that is not complete."""
        return WeightError(f"no weight group of {self.world_size} at {self.address}:{self.port}: {first_line(error)}")


class TorchChannel:
    """Owns one rank of a process group that is not registered globally."""

    def __init__(self, place: Place, *, backend: GroupBackend, prefix: str, greeting: str = "") -> None:
        """Join the group.

        `prefix` is the key prefix in the store. The place's timeout also limits every broadcast. Ranks with the same
        non-empty `greeting` detect each other (`greeted`). Raises `ValueError` naming the field, `WeightError` if the
        group is not complete in time.
        """
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be gloo or nccl, got {backend!r}")
        has_nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
        if not dist.is_available() or (backend == "nccl" and not has_nccl):
            raise ValueError(f"backend: {backend} is not available in this build of torch or on this machine")
        self.timeout = timedelta(seconds=place.timeout)  # most for a broadcast; may change between two of them
        rank, world_size = place.rank, place.world_size
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        try:
            if place.given_up is not None and rank:
                place.await_host()
            store = dist.PrefixStore(prefix, place.store())  # type: ignore[attr-defined]
            if greeting:
                store.set(f"{greeting}{rank}", "")
            self._group: Any
            if backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, rank, world_size, self.timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout
                self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
            # Every rank set its key before the group was complete.
            others = range(world_size) if greeting else ()
            self.greeted = frozenset(one for one in others if store.check([f"{greeting}{one}"]))
            """Ranks with the same greeting, this one included."""
        except (RuntimeError, ValueError) as error:
            raise place.failed(error) from error

    def broadcast(self, data: Tensor) -> None:
        """See `Channel`; raises `WeightError` after the timeout, too."""
        try:
            self._group.broadcast(data, 0).wait(self.timeout)
        except RuntimeError as error:
            raise WeightError(f"the broadcast failed, the group is closed: {first_line(error)}") from error

    def close(self, *, is_receiving: bool) -> None:
        """See `Channel`. A running broadcast ends when its data arrives or after the timeout."""
        if not is_receiving:
            self._group.shutdown()


class OtherSizeError(WeightError):
    """A broadcast had another size than announced; it was received completely."""


class Member:
    """Owns one rank of a separate process group; torch's default group is not used.

    After a failure, `close` the group and create a new one.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.is_receiving = False  # True while an update is received
        self._is_broken = False

    @property
    def device(self) -> torch.device:
        """Return the device of tensors that need not be copied for a broadcast."""
        return self.channel.device

    def close(self) -> None:
        """Leave the group. A running broadcast of torch's ends when its data arrives or after the timeout, NCCL's at
        once. Can be called again."""
        if not self._is_broken:
            self._is_broken = True
            self.channel.close(is_receiving=self.is_receiving)

    def broadcast(self, data: Tensor) -> Tensor:
        """Send `data` (rank 0) or receive into it; return the tensor. A failure closes the group permanently."""
        if self._is_broken:
            raise WeightError("the weight group is closed or has failed; join a new one")
        on_device = data.to(self.device)
        try:
            self.channel.broadcast(on_device)
        except BaseException:
            self._is_broken = True
            raise
        return on_device.to(data.device)


def receive_alone(group: Member, spec: PlainSpec) -> list[tuple[str, Tensor]]:
    """Receive a tensor that is broadcast by itself."""
    return [(spec.name, group.broadcast(huge_empty(spec.shape, DTYPES[spec.dtype], group.device)))]


def receive_bucket(group: Member, specs: Sequence[PlainSpec]) -> list[tuple[str, Tensor]]:
    """Receive several tensors that are broadcast as one array of bytes."""
    size = sum(spec.num_bytes for spec in specs)
    return unpacked(group.broadcast(huge_empty((size,), torch.uint8, group.device)), specs)


def received(group: Member, receivers: Iterable[Receiver]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one update; close the group if it is unknown what the trainer sends next.

    If it is closed early, or a broadcast has another size than announced, the remaining ones are received and
    dropped: the trainer sends them all. Raises `WeightError` if an earlier update is still received.
    """
    if group.is_receiving:
        raise WeightError("the weight group still receives an earlier update")
    group.is_receiving = True
    left = iter(receivers)
    try:
        try:
            for receive in left:
                yield from receive()
        except (GeneratorExit, OtherSizeError) as error:
            if isinstance(error, OtherSizeError):
                _log.warning("an update will be refused after its remaining tensors are received: %s", error)
            for receive in left:
                with suppress(OtherSizeError):
                    receive()
            raise
    except (GeneratorExit, OtherSizeError):
        raise
    except BaseException:
        group.close()  # a broadcast may be half received: the next would receive its remainder
        raise
    finally:
        group.is_receiving = False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
