"""Weights through a process group as most trainers send them: one broadcast for each tensor, in an order told before.

Trainers in SGLang's way make their group with `torch.distributed.rendezvous("tcp://…")`, a `PrefixStore` of the group's
name around its store, and torch's `_new_process_group_helper`. That puts two more prefixes around (torch 2.13,
distributed_c10d.py): the group's name with a slash, and the first kind of device that the backend serves, with a slash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from nano_inference.loader.pieces import DTYPES
from nano_inference.memory import huge_empty
from nano_inference.types import WeightError
from nano_inference.weights.member import GroupBackend, Member

_MAX_TENSOR_BYTES = 1 << 40


class PlainSpec(NamedTuple):
    """What is told of a tensor before it is broadcast."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class PlainGroup(Member):
    """Owns one rank of a trainer's group; rank 0 is the trainer.

    What is broadcast must have the size that was told: gloo ends the process otherwise.
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
    ) -> None:
        """Meet the trainer and the other ranks, as `Member` does. Raises as it does."""
        prefix = f"{name}/{name}//{first_device(backend)}/"
        super().__init__(
            address, port, rank=rank, world_size=world_size, backend=backend, timeout=timeout, prefix=prefix
        )
        self.is_receiving = False
        """Whether an update takes from it."""

    def receive(self, specs: Sequence[PlainSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the order told, each a memory of its own.

        When the reader stops early, the rest is received and dropped, so that the trainer is not left waiting and the
        group can be used again. Raises `WeightError` when the trainer falls silent or goes away.
        """
        if self.is_receiving:
            raise WeightError("the weight group still receives an earlier update")
        self.is_receiving = True
        left = iter(specs)
        try:
            for spec in left:
                yield spec.name, self._receive_one(spec)
        except GeneratorExit:
            for spec in left:
                self._receive_one(spec)
            raise
        except BaseException:
            self._is_broken = True  # a broadcast may be half taken: the next would meet the rest of it
            raise
        finally:
            self.is_receiving = False

    def close(self) -> None:
        """Leave the group; a broadcast that is waited for ends by itself, when it comes or after the timeout."""
        if self.is_receiving:
            self._is_broken = True
        super().close()

    def _receive_one(self, spec: PlainSpec) -> Tensor:
        return self._broadcast(huge_empty(spec.shape, DTYPES[spec.dtype], self._device))


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
