"""Weight updates through a process group: a trainer (rank 0) broadcasts packed buckets to engines (ranks 1 and up).

Format, one broadcast each: the header's length (8 bytes, little-endian); the header, JSON
`[bucket_bytes, [name, dtype, shape], …]`; the buckets of `plan_buckets`, in which tensors start at multiples of 16
bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.checks import check_int
from nano_inference.loader.pieces import DTYPES
from nano_inference.memory import huge_empty
from nano_inference.types import WeightError
from nano_inference.weights.member import GroupBackend, Member

_ALIGNMENT = 16
_BUCKET_BYTES = 64 << 20
_PREFIX = "nano-inference-weights"
_MAX_HEADER_BYTES = 64 << 20


class TensorSpec(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return its bytes in a bucket, including padding."""
        return -(-math.prod(self.shape) * DTYPES[self.dtype].itemsize // _ALIGNMENT) * _ALIGNMENT


class WeightGroup(Member):
    """Owns one rank of a separate process group; torch's default group is not used.

    Rank 0 calls `send`, every other rank `receive`. After a failure, `close` the group and create a new one.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: GroupBackend = "gloo",
        timeout: float = 300.0,
    ) -> None:
        """Join the group at rank 0's `address` and `port`; wait at most `timeout` seconds for the other ranks.

        `timeout` also limits every broadcast. Raises `ValueError` naming the field, `WeightError` if the group is not
        complete in time.
        """
        super().__init__(
            address, port, rank=rank, world_size=world_size, backend=backend, timeout=timeout, prefix=_PREFIX
        )
        self.rank = rank
        self.world_size = world_size
        self._is_receiving = False

    def send(
        self, named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        """Broadcast weights to the engines; return when this rank has sent all of them. Rank 0 only.

        An iterator is first collected into a dict, because the header names all tensors; they are not copied.
        """
        if self.rank != 0:
            raise ValueError(f"rank 0 sends; this is rank {self.rank}")
        check_int("bucket_bytes", bucket_bytes, _ALIGNMENT)
        tensors = dict(named)
        specs = [TensorSpec(name, _dtype(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
        header = json.dumps([bucket_bytes, *specs]).encode()
        self.broadcast(torch.tensor(list(len(header).to_bytes(8, "little")), dtype=torch.uint8))
        self.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for bucket in plan_buckets(specs, bucket_bytes):
            packed = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=self._device)
            for spec, target in _parts(bucket, packed):
                target.copy_(tensors[spec.name].detach())
            self.broadcast(packed)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of one update; a tensor is valid until the next is requested.

        If the generator is closed early, the remaining broadcasts are received and dropped, so that the group stays
        usable. Raises `WeightError` if the sender disconnects or a broadcast times out.
        """
        if self.rank == 0:
            raise ValueError("rank 0 sends; it does not receive")
        return self._receive()

    def _receive(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_receiving:
            raise WeightError("the weight group still receives an earlier update")
        self._is_receiving = True
        try:
            yield from self._receive_all(iter(self._receive_plan()))
        except (GeneratorExit, WeightError):
            raise
        except BaseException:
            self._is_broken = True  # a broadcast may be half received: the next would receive its remainder
            raise
        finally:
            self._is_receiving = False

    def _receive_all(self, buckets: Iterator[list[TensorSpec]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all buckets; if closed early, receive the remaining buckets."""
        try:
            for bucket in buckets:
                yield from ((spec.name, part) for spec, part in _parts(bucket, self._receive_bucket(bucket)))
        except GeneratorExit:
            # gloo aborts the process if a broadcast has another size than the receiver's memory.
            for bucket in buckets:
                self._receive_bucket(bucket)
            raise

    def _receive_plan(self) -> list[list[TensorSpec]]:
        """Receive the header; return the tensors of each bucket."""
        length = int.from_bytes(bytes(self.broadcast(torch.zeros(8, dtype=torch.uint8)).tolist()), "little")
        if length > _MAX_HEADER_BYTES:
            self._is_broken = True
            raise WeightError(f"the sender announces a header of {length} bytes; the limit is {_MAX_HEADER_BYTES}")
        header = self.broadcast(torch.zeros(length, dtype=torch.uint8))
        bucket_bytes, *entries = json.loads(bytes(header.numpy().data))
        return plan_buckets([TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in entries], bucket_bytes)

    def _receive_bucket(self, bucket: Sequence[TensorSpec]) -> Tensor:
        num_bytes = sum(spec.num_bytes for spec in bucket)
        return self.broadcast(huge_empty((num_bytes,), torch.uint8, self._device))


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Fill buckets with tensors in order; a tensor larger than `bucket_bytes` gets a bucket of its own."""
    buckets: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not buckets or spec.num_bytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return buckets


def _parts(bucket: Sequence[TensorSpec], packed: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield each tensor of a bucket as a view of `packed`."""
    start = 0
    for spec in bucket:
        dtype = DTYPES[spec.dtype]
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        yield spec, packed[start : start + num_bytes].view(dtype).view(spec.shape)
        start += spec.num_bytes


def _dtype(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightError(f"{name}: has the dtype {dtype}; known: {', '.join(DTYPES)}")
    return dtype
