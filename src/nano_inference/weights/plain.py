"""Weight updates through a process group without headers: one broadcast per tensor, in an order announced before.

SGLang-style trainers create the group with `torch.distributed.rendezvous("tcp://…")`, a `PrefixStore` named after the
group, and torch's `_new_process_group_helper`, which adds two more prefixes (torch 2.13, distributed_c10d.py): the
group's name and a slash, and the first device type of the backend and a slash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from nano_inference.loading.pieces import DTYPES
from nano_inference.support.memory import huge_empty
from nano_inference.types import WeightError
from nano_inference.weights.member import (
    Channel,
    GroupBackend,
    Member,
    OtherSizeError,
    Place,
    PlainSpec,
    Receiver,
    Shapes,
    TorchChannel,
    buckets,
    receive_alone,
    receive_bucket,
    received,
    unpacked,
)

_WIDEST = max(dtype.itemsize for dtype in DTYPES.values())
_SPARE_BYTES = 64 << 10  # receive buffer beyond the largest expected size
_MAX_GUESS_BYTES = 8 << 30  # largest receive buffer for the model's shape of a tensor, if another shape was announced
_UNIT = b"\xa5\xff"
_MARK = _UNIT * 4
"""Written around the possible ends of a broadcast: no weight has this value, which is NaN or nearly infinite."""
_GREETING = "nano-inference-room/"


def plain_group(place: Place, name: str, backend: GroupBackend = "gloo") -> PlainGroup:
    """Join the group `name` of a trainer that uses torch's. Raises as `TorchChannel`."""
    prefix = f"{name}/{name}//{first_device(backend)}/"
    channel = TorchChannel(place, backend=backend, prefix=prefix, greeting=_GREETING)
    next_ranks = forwarded_to(place.rank, place.world_size)
    return PlainGroup(channel, next_ranks, is_oversized=backend == "gloo" and channel.greeted.issuperset(next_ranks))


class PlainGroup(Member):
    """Owns one rank of a trainer's group, and its receive buffer; rank 0 is the trainer.

    gloo aborts the process if a broadcast has more bytes than the receive buffer. The buffer is therefore larger than
    announced (the same number of the widest values, and some more), and marks show where the broadcast ended.
    """

    def __init__(self, channel: Channel, next_ranks: tuple[int, ...] = (), *, is_oversized: bool = False) -> None:
        """`next_ranks` are those to which gloo forwards rank 0's broadcasts.

        `is_oversized`: receive into a larger buffer. gloo forwards the whole buffer, which only this program accepts.
        """
        super().__init__(channel)
        self._is_oversized = is_oversized
        self._is_last = not next_ranks
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def buffer_bytes(self) -> int:
        """Size of the receive buffer in bytes; 0 unless `receive` is running."""
        return self._buffer.numel()

    def receive(
        self, specs: Sequence[PlainSpec], own: Shapes = MappingProxyType({}), *, bucket_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the announced order; a tensor is valid until the next is requested.

        With `bucket_bytes`, the trainer broadcasts the tensors of each of `buckets` as one array of bytes.

        `own` holds the model's shapes: the trainer may send those instead of the announced ones. If the generator is
        closed early, or a broadcast has another size than announced (`WeightError`), the remaining broadcasts are
        received and dropped, so that the trainer does not block and the group stays usable. Raises `WeightError` also
        if the trainer disconnects or a broadcast times out.
        """
        receivers: list[Receiver] = [partial(self._receive_alone, spec, own) for spec in specs]
        if bucket_bytes is not None:
            found = buckets(specs, bucket_bytes)
            sizes = [sum(spec.num_bytes for spec in bucket) for bucket in found]
            rest = reversed([*accumulate(reversed(sizes))])
            receivers = [partial(self._receive_bucket, *each) for each in zip(found, sizes, rest, strict=True)]
        try:
            yield from received(self, receivers)
        finally:
            self._buffer = torch.empty(0, dtype=torch.uint8)

    def _receive_alone(self, spec: PlainSpec, own: Shapes) -> list[tuple[str, Tensor]]:
        if not self._is_oversized:
            return receive_alone(self, spec)
        guesses = possible_specs(spec, own if self._is_last else {})
        num_bytes = max(math.prod(spec.shape) * _WIDEST, *(one.num_bytes for one in guesses)) + _SPARE_BYTES
        buffer = self._oversized(num_bytes, [one.num_bytes for one in guesses])
        if not ends_at(buffer, spec.num_bytes):
            compared = "fewer" if _marked_after(buffer, spec.num_bytes) else "more"
            seems = [one.form for one in guesses if one.num_bytes != spec.num_bytes and ends_at(buffer, one.num_bytes)]
            guess = f"it seems to be {' or '.join(seems)}" if seems else "was another dtype or shape sent?"
            raise OtherSizeError(
                f"{spec.name}: announced as {spec.form}, {spec.num_bytes} bytes, but the sender's broadcast has "
                f"{compared}; {guess}"
            )
        return [(spec.name, buffer[: spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape))]

    def _receive_bucket(self, specs: Sequence[PlainSpec], size: int, rest: int) -> list[tuple[str, Tensor]]:
        """Return the tensors of a bucket; copies where the array does not align them.

        `size`: its bytes; `rest`: those of this and all later buckets, more than which a trainer with other buckets
        does not send at once. After such a broadcast it is unknown where the next one ends, so the group is left.
        """
        if not self._is_oversized:
            return receive_bucket(self, specs)
        buffer = self._oversized(min(rest, size + _MAX_GUESS_BYTES) + _SPARE_BYTES, [size])
        if not ends_at(buffer, size):
            compared = "fewer" if _marked_after(buffer, size) else "more"
            raise WeightError(
                f"a packed broadcast of {len(specs)} tensors from {specs[0].name} on has {compared} than the "
                f"announced {size} bytes; is packed_buffer_size_bytes the trainer's? Join the group again"
            )
        return unpacked(buffer, specs)

    def _oversized(self, num_bytes: int, ends: Sequence[int]) -> Tensor:
        """Return a buffer of bytes with a broadcast, and marks around its possible ends."""
        if self._buffer.numel() < num_bytes:
            self._buffer = huge_empty((num_bytes,), torch.uint8, self.device)
        buffer = self._buffer[:num_bytes]
        for end in ends:
            mark(buffer, end)
        self.broadcast(buffer)
        return buffer


def forwarded_to(rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks to which this one forwards rank 0's broadcasts: gloo uses a binomial tree."""
    steps = (1 << i for i in range(rank.bit_length(), world_size.bit_length()))
    return tuple(rank + step for step in steps if rank + step < world_size)


def possible_specs(spec: PlainSpec, own: Shapes) -> list[PlainSpec]:
    """Return what a broadcast may contain: the announced tensor first, then other dtypes, then the model's shape."""
    shapes = [spec.shape]
    shape = own.get(spec.name, spec.shape)
    if shape != spec.shape and math.prod(shape) * _WIDEST <= _MAX_GUESS_BYTES:
        shapes.append(shape)
    every = (PlainSpec(spec.name, dtype, shape) for shape in shapes for dtype in (spec.dtype, *DTYPES))
    return list(dict.fromkeys(every))


def mark(buffer: Tensor, end: int) -> None:
    """Write marks around a byte, so that `ends_at` can check whether a broadcast ended there."""
    start = max(0, end - len(_UNIT))
    marks = _UNIT * ((end - start + len(_MARK)) // len(_UNIT))
    buffer[start : start + len(marks)] = torch.frombuffer(bytearray(marks), dtype=torch.uint8)


def ends_at(buffer: Tensor, end: int) -> bool:
    """Return True if a broadcast overwrote the marks before a byte, but not those after it."""
    last = bytes(buffer[max(0, end - len(_UNIT)) : end].tolist())
    return _marked_after(buffer, end) and last != _UNIT


def _marked_after(buffer: Tensor, end: int) -> bool:
    return bytes(buffer[end : end + len(_MARK)].tolist()) == _MARK


def first_device(backend: GroupBackend) -> str:
    """Return the device type that torch adds to the name of a group with one backend."""
    return next(iter(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()))
