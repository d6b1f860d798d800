"""Weights through a process group: a trainer (rank 0) sends, engines (ranks 1 and on) receive, in packed buckets.

Every transfer begins with a header that names all tensors, so that the two sides cannot disagree about what comes.
Format: 8 bytes little-endian length; that many bytes of JSON `[[name, dtype, shape], …]`; then the tensors' bytes, each
begun at a multiple of 16, packed into buckets as `plan_buckets` says; one broadcast for each of these.
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
    """What is told of a tensor before its bytes come."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in a bucket, the gap to the next included."""
        return -(-math.prod(self.shape) * DTYPES[self.dtype].itemsize // _ALIGNMENT) * _ALIGNMENT


class WeightGroup(Member):
    """Owns one rank of a process group of its own; torch's default group is neither needed nor touched.

    Rank 0 calls `send`, every other rank `receive`. A group that failed cannot be used again: `close` it, join anew.
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
        """Meet the others at rank 0's `address` and `port`, waiting `timeout` seconds at most for them.

        `timeout` also bounds every broadcast. Raises `ValueError` naming the field, `WeightError` when nobody comes.
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
        """Broadcast weights to the engines; returns when this rank's part is done. Rank 0 only.

        An iterator is read twice (first for the header), so it is kept as a list; its tensors are not copied.
        """
        if self.rank != 0:
            raise ValueError(f"rank 0 sends; this is rank {self.rank}")
        check_int("bucket_bytes", bucket_bytes, _ALIGNMENT)
        tensors = dict(named)
        specs = [TensorSpec(name, _dtype(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
        header = json.dumps([bucket_bytes, *specs]).encode()
        self._broadcast(torch.tensor(list(len(header).to_bytes(8, "little")), dtype=torch.uint8))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for bucket in plan_buckets(specs, bucket_bytes):
            packed = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=self._device)
            for spec, target in _parts(bucket, packed):
                target.copy_(tensors[spec.name].detach())
            self._broadcast(packed)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that rank 0 sends; each is good until the next is asked for.

        When the reader stops early, what still comes is received and dropped, so that the group can be used again.
        Raises `WeightError` when the sender falls silent or goes away.
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
            self._is_broken = True  # a broadcast may be half taken: the next would meet the rest of it
            raise
        finally:
            self._is_receiving = False

    def _receive_all(self, buckets: Iterator[list[TensorSpec]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all buckets; take in the rest when the reader stops early."""
        try:
            for bucket in buckets:
                yield from ((spec.name, part) for spec, part in _parts(bucket, self._receive_bucket(bucket)))
        except GeneratorExit:
            # A broadcast that meets none of its size makes gloo end the process.
            for bucket in buckets:
                self._receive_bucket(bucket)
            raise

    def _receive_plan(self) -> list[list[TensorSpec]]:
        """Receive the header and return what each bucket will hold."""
        length = int.from_bytes(bytes(self._broadcast(torch.zeros(8, dtype=torch.uint8)).tolist()), "little")
        if length > _MAX_HEADER_BYTES:
            self._is_broken = True
            raise WeightError(f"the sender announces a header of {length} bytes; the limit is {_MAX_HEADER_BYTES}")
        header = self._broadcast(torch.zeros(length, dtype=torch.uint8))
        bucket_bytes, *entries = json.loads(bytes(header.numpy().data))
        return plan_buckets([TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in entries], bucket_bytes)

    def _receive_bucket(self, bucket: Sequence[TensorSpec]) -> Tensor:
        num_bytes = sum(spec.num_bytes for spec in bucket)
        return self._broadcast(huge_empty((num_bytes,), torch.uint8, self._device))


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Put tensors into buckets in order, each as full as it can be; a larger tensor has one to itself."""
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
    """Yield each tensor of a bucket as a view of its bytes."""
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
