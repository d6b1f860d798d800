"""Weights through a process group as most trainers send them: one broadcast for each tensor, in an order told before.

Trainers in SGLang's way make their group with `torch.distributed.rendezvous("tcp://…")`, a `PrefixStore` of the group's
name around its store, and torch's `_new_process_group_helper`. That puts two more prefixes around (torch 2.13,
distributed_c10d.py): the group's name with a slash, and the first kind of device that the backend serves, with a slash.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Event
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from nano_inference.loader.pieces import DTYPES
from nano_inference.loader.sources import HARMLESS_SUFFIX
from nano_inference.memory import huge_empty
from nano_inference.types import WeightError
from nano_inference.weights.member import GroupBackend, Member

_log = logging.getLogger(__name__)
_MAX_TENSOR_BYTES = 1 << 40
_WIDEST = max(dtype.itemsize for dtype in DTYPES.values())
_SPARE_BYTES = 64 << 10
"""Room beyond everything that could reasonably come."""
_MOST_GUESSED_BYTES = 8 << 30
"""Room that the model's own shape may ask for, when another one was told of."""
_UNIT = b"\xa5\xff"
_MARK = _UNIT * 4
"""What lies around the places where a broadcast may end: no weight has such a value, it is NaN or nearly infinite."""
_GREETING = "nano-inference-room/"

Shapes = Mapping[str, tuple[int, ...]]
"""The names and shapes of a model's own weights."""


class PlainSpec(NamedTuple):
    """What is told of a tensor before it is broadcast."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def form(self) -> str:
        """Precision and shape, for a message."""
        return f"{self.dtype} {list(self.shape)}"


class PlainGroup(Member):
    """Owns one rank of a trainer's group, and the memory it receives into; rank 0 is the trainer.

    gloo ends the process when a broadcast has more bytes than the memory it is received into. So that memory has room
    for the same number of the widest values and some more, and marks tell afterwards where the broadcast ended.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str,
        backend: GroupBackend = "gloo",
        timeout: float = 300.0,
        given_up: Event | None = None,
    ) -> None:
        """Meet the trainer and the other ranks, as `Member` does. Raises as it does."""
        super().__init__(
            address,
            port,
            rank=rank,
            world_size=world_size,
            backend=backend,
            timeout=timeout,
            prefix=f"{name}/{name}//{first_device(backend)}/",
            given_up=given_up,
            greeting=_GREETING,
        )
        self.is_receiving = False
        """Whether an update takes from it."""
        next_ranks = handed_to(rank, world_size)
        self._has_room = backend == "gloo" and self._greeted.issuperset(next_ranks)
        """Whether more may be received than was told. What is received is handed on whole, and would be too much for a
        rank that is not of our kind."""
        self._is_last = not next_ranks
        self._room = torch.empty(0, dtype=torch.uint8)

    def receive(self, specs: Sequence[PlainSpec], own: Shapes = MappingProxyType({})) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the order told; each is good until the next is asked for.

        `own` are the model's weights, which what comes may be in truth. When the reader stops early, the rest is
        received and dropped, so that the trainer is not left waiting and the group can be used again; so it is when a
        broadcast has not the size that was told, and then `WeightError` is raised. It is raised, too, when the trainer
        falls silent or goes away.
        """
        if self.is_receiving:
            raise WeightError("the weight group still receives an earlier update")
        self.is_receiving = True
        left = iter(specs)
        try:
            for spec in left:
                yield spec.name, self._receive_one(spec, own)
        except (GeneratorExit, _OtherSizeError) as error:
            if isinstance(error, _OtherSizeError):
                _log.warning("an update is refused once the rest of its tensors has come: %s", error)
            for spec in left:
                with suppress(_OtherSizeError):
                    self._receive_one(spec, own)
            raise
        except BaseException:
            self._is_broken = True  # a broadcast may be half taken: the next would meet the rest of it
            raise
        finally:
            self._room = torch.empty(0, dtype=torch.uint8)
            self.is_receiving = False

    def close(self) -> None:
        """Leave the group; a broadcast that is waited for ends by itself, when it comes or after the timeout."""
        if self.is_receiving:
            self._is_broken = True
        super().close()

    def _receive_one(self, spec: PlainSpec, own: Shapes) -> Tensor:
        if not self._has_room:
            return self._broadcast(huge_empty(spec.shape, DTYPES[spec.dtype], self._device))
        guesses = guessed(spec, own if self._is_last else {})
        num_bytes = max(math.prod(spec.shape) * _WIDEST, *(one.num_bytes for one in guesses)) + _SPARE_BYTES
        if self._room.numel() < num_bytes:
            self._room = huge_empty((num_bytes,), torch.uint8, self._device)
        room = self._room[:num_bytes]
        for one in guesses:
            mark(room, one.num_bytes)
        self._broadcast(room)
        if not ends_at(room, spec.num_bytes):
            raise _OtherSizeError(_other_size(room, spec, guesses))
        return room[: spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape)


class _OtherSizeError(WeightError):
    """A broadcast had another size than was told; it was received whole."""


def handed_to(rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks to which this one hands on a broadcast of rank 0: gloo's way is a binomial tree."""
    steps = (1 << i for i in range(rank.bit_length(), world_size.bit_length()))
    return tuple(rank + step for step in steps if rank + step < world_size)


def misfits(specs: Sequence[PlainSpec], own: Shapes) -> list[str]:
    """Return what is wrong with tensors that were told of, by the names and shapes of the model's weights."""
    faults = []
    for spec in specs:
        if spec.name not in own and not spec.name.endswith(HARMLESS_SUFFIX):
            faults.append(f"{spec.name}: the model has no such tensor")
        elif own.get(spec.name, spec.shape) != spec.shape:
            faults.append(f"{spec.name}: has the shape {spec.shape}, the model {own[spec.name]}")
    return faults


def guessed(spec: PlainSpec, own: Shapes) -> list[PlainSpec]:
    """Return what a broadcast may be: first what was told, then other precisions, also of the model's own shape."""
    shapes = [spec.shape]
    shape = own.get(spec.name, spec.shape)
    if shape != spec.shape and math.prod(shape) * _WIDEST <= _MOST_GUESSED_BYTES:
        shapes.append(shape)
    every = (PlainSpec(spec.name, dtype, shape) for shape in shapes for dtype in (spec.dtype, *DTYPES))
    return list(dict.fromkeys(every))


def mark(room: Tensor, end: int) -> None:
    """Prepare to see whether a broadcast ends at a byte."""
    start = max(0, end - len(_UNIT))
    marks = _UNIT * ((end - start + len(_MARK)) // len(_UNIT))
    room[start : start + len(marks)] = torch.frombuffer(bytearray(marks), dtype=torch.uint8)


def ends_at(room: Tensor, end: int) -> bool:
    """Whether a broadcast has written up to a byte that was marked, and no further."""
    last, rest = (bytes(room[max(0, start) : stop].tolist()) for start, stop in _around(end))
    return rest == _MARK and last != _UNIT


def _around(end: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (end - len(_UNIT), end), (end, end + len(_MARK))


def _other_size(room: Tensor, spec: PlainSpec, guesses: Sequence[PlainSpec]) -> str:
    """Say what was told, and what seems to have come."""
    is_more = bytes(room[spec.num_bytes : spec.num_bytes + len(_MARK)].tolist()) != _MARK
    seems = [one.form for one in guesses if one.num_bytes != spec.num_bytes and ends_at(room, one.num_bytes)]
    guess = f"it seems to be {' or '.join(seems)}" if seems else "was another dtype or shape sent?"
    told = f"{spec.name}: {spec.form} was told, {spec.num_bytes} bytes"
    return f"{told}, but the sender's broadcast has {'more' if is_more else 'fewer'}; {guess}"


def first_device(backend: GroupBackend) -> str:
    """Return the kind of device after which torch names a group of one backend."""
    return next(iter(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()))


def plain_specs(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], dtypes_field: str = "dtypes"
) -> tuple[PlainSpec, ...]:
    """Return the tensors that three lists tell of. Raises `ValueError` naming the list that is wrong."""
    for field, values in ((dtypes_field, dtypes), ("shapes", shapes)):
        if len(values) != len(names):
            raise ValueError(f"{field} must have one entry for each of {len(names)} names, has {len(values)}")
    specs = []
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        known = dtype.removeprefix("torch.")
        if known not in DTYPES:
            raise ValueError(f"{dtypes_field}[{index}] must be one of {', '.join(DTYPES)}, got {dtype[:64]!r}")
        if math.prod(shape) * DTYPES[known].itemsize > _MAX_TENSOR_BYTES:
            raise ValueError(f"shapes[{index}] comes to more than {_MAX_TENSOR_BYTES} bytes")
        specs.append(PlainSpec(name, known, tuple(shape)))
    return tuple(specs)
