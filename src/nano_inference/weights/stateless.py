"""Weight updates from trainers that use vLLM's communicator, not torch's process groups: TRL, prime-rl, PipelineRL.

vLLM's StatelessProcessGroup (vllm/distributed/utils.py) is a `TCPStore` without a prefix, hosted by rank 0. Its
PyNcclCommunicator (device_communicators/pynccl.py) gets from there, under `broadcast_from/0/0`, NCCL's unique id as a
pickled ctypes structure, joins the NCCL communicator and adds up one float32 zero. From then on the trainer broadcasts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from nano_inference.loading.pickle_data import Named, PickleError, name_of, read_data
from nano_inference.loading.pieces import DTYPES
from nano_inference.support.memory import huge_empty
from nano_inference.types import WeightError
from nano_inference.weights.member import await_host, check_place, first_line
from nano_inference.weights.nccl import UNIQUE_ID_BYTES, Communicator
from nano_inference.weights.plain import PlainSpec, Shapes, buckets, received, received_bucket

_KEY = "broadcast_from/0/0"
_REBUILD = "_ctypes _unpickle"
_CLASSES = frozenset(
    f"{package}.distributed.device_communicators.pynccl_wrapper ncclUniqueId"
    for package in ("vllm", "vllm.backends", "sglang.srt")
)
_GPU = torch.device("cuda")


class StatelessGroup:
    """Owns one rank of a trainer's group; rank 0 is the trainer."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        timeout: float = 300.0,
        given_up: threading.Event | None = None,
        device: torch.device = _GPU,
        library: str | None = None,
    ) -> None:
        """Join the trainer's group; wait at most `timeout` seconds for its store, and for the others in NCCL.

        Another thread may set `given_up` to cancel waiting for rank 0. `device` has the received tensors; `library` is
        the file of libnccl. Raises `ValueError` naming the field, `WeightError` if the group is not complete in time.
        """
        check_place(address, port, rank, world_size, timeout)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("backend: nccl needs a CUDA device; on a CPU send weights by a directory or gloo")
        self._device = device
        self.is_receiving = False  # True while `receive` is running
        self._is_closed = False
        await_host(address, port, timeout, given_up or threading.Event())
        unique_id = _fetch_id(address, port, world_size, timeout)
        self._communicator = Communicator(unique_id, rank=rank, world_size=world_size, device=device, library=library)

    @property
    def device(self) -> torch.device:
        """Return the device of tensors that need not be copied for a broadcast."""
        return self._device

    def receive(
        self, specs: Sequence[PlainSpec], own: Shapes = MappingProxyType({}), *, bucket_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the announced order, as `PlainGroup.receive` does.

        NCCL does not compare sizes, so `own` is not used: a broadcast of another size blocks until the group is left.
        """
        if bucket_bytes is None:
            return received(self, [partial(self._receive_alone, spec) for spec in specs])
        return received(self, [partial(received_bucket, self, bucket) for bucket in buckets(specs, bucket_bytes)])

    def broadcast(self, data: Tensor) -> Tensor:
        """Receive rank 0's array into `data`; return the tensor. A failure closes the group permanently."""
        if self._is_closed:
            raise WeightError("the weight group is closed or has failed; join a new one")
        is_there = data.device.type == self._device.type
        received = data if is_there else torch.empty_like(data, device=self._device)
        try:
            self._communicator.broadcast(received)
        except BaseException:
            self.close()
            raise
        return data if is_there else data.copy_(received)

    def close(self) -> None:
        """Leave the group, also during a broadcast. Can be called again."""
        self._is_closed = True
        self._communicator.close()

    def _receive_alone(self, spec: PlainSpec) -> list[tuple[str, Tensor]]:
        return [(spec.name, self.broadcast(huge_empty(spec.shape, DTYPES[spec.dtype], self._device)))]


def _fetch_id(address: str, port: int, world_size: int, timeout: float) -> bytes:
    """Return NCCL's unique id from the trainer's store."""
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout)
        )
        return read_unique_id(store.get(_KEY))
    except PickleError as error:
        raise WeightError(f"the trainer at {address}:{port} sent no unique id of NCCL: {error}") from None
    except (RuntimeError, ValueError) as error:
        raise WeightError(f"no weight group of {world_size} at {address}:{port}: {first_line(error)}") from error


def read_unique_id(data: bytes) -> bytes:
    """Return the bytes of a pickled ncclUniqueId, which ctypes pickles as `_unpickle(class, (dict, bytes))`.

    Raises `PickleError`.
    """
    value = read_data(data, _CLASSES | {_REBUILD})
    if isinstance(value, Named) and value.name == _REBUILD and len(value.arguments) == 2:
        kind, state = value.arguments
        if name_of(kind) in _CLASSES and isinstance(state, tuple) and len(state) == 2:
            attributes, found = state
            if attributes == {} and isinstance(found, bytes) and len(found) == UNIQUE_ID_BYTES:
                return found
    raise PickleError("it is not a pickled ncclUniqueId of 128 bytes")
