"""Weight updates through a process group: a trainer (rank 0) broadcasts packed buckets to engines (ranks 1 and up).

Format, one broadcast each: the header's length (8 bytes, little-endian); the header, JSON
`[bucket_bytes, [name, dtype, shape], …]`; the tensors of each of `member.buckets` as one array of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from nano_inference.loading.pieces import DTYPES
from nano_inference.support.checks import check_int
from nano_inference.types import WeightError
from nano_inference.weights.member import (
    GroupBackend,
    Member,
    Place,
    PlainSpec,
    Receiver,
    TorchChannel,
    buckets,
    receive_bucket,
    received,
)

_BUCKET_BYTES = 64 << 20
_PREFIX = "nano-inference-weights"
_MAX_HEADER_BYTES = 64 << 20


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
        place = Place(address, port, rank, world_size, timeout)
        super().__init__(TorchChannel(place, backend=backend, prefix=_PREFIX))
        self.rank = rank
        self.world_size = world_size

    def send(
        self, named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        """Broadcast weights to the engines; return when this rank has sent all of them. Rank 0 only.

        An iterator is first collected into a dict, because the header names all tensors; they are not copied.
        """
        if self.rank != 0:
            raise ValueError(f"rank 0 sends; this is rank {self.rank}")
        check_int("bucket_bytes", bucket_bytes, 1)
        tensors = dict(named)
        specs = []
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise WeightError(f"{name}: has the dtype {dtype}; known: {', '.join(DTYPES)}")
            specs.append(PlainSpec(name, dtype, tuple(tensor.shape)))
        header = json.dumps([bucket_bytes, *specs]).encode()
        self.broadcast(torch.tensor(list(len(header).to_bytes(8, "little")), dtype=torch.uint8))
        self.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for bucket in buckets(specs, bucket_bytes):
            parts = (tensors[spec.name].detach().to(self.device).contiguous() for spec in bucket)
            self.broadcast(torch.cat([part.view(-1).view(torch.uint8) for part in parts]))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of one update; a tensor is valid until the next is requested.

        If the generator is closed early, the remaining broadcasts are received and dropped, so that the group stays
        usable. Raises `WeightError` if the sender disconnects or a broadcast times out.
        """
        if self.rank == 0:
            raise ValueError("rank 0 sends; it does not receive")
        return received(self, self._receivers())

    def _receivers(self) -> Iterator[Receiver]:
        length = int.from_bytes(bytes(self.broadcast(torch.zeros(8, dtype=torch.uint8)).tolist()), "little")
        if length > _MAX_HEADER_BYTES:
            raise WeightError(f"the sender announces a header of {length} bytes; the limit is {_MAX_HEADER_BYTES}")
        header = self.broadcast(torch.zeros(length, dtype=torch.uint8))
        bucket_bytes, *entries = json.loads(bytes(header.numpy().data))
        specs = [PlainSpec(name, dtype, tuple(shape)) for name, dtype, shape in entries]
        yield from (partial(receive_bucket, self, bucket) for bucket in buckets(specs, bucket_bytes))
