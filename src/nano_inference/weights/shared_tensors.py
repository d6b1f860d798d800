"""Open the memory that a trainer on the same machine shares, and yield its weights.

CPU memory is opened and released by torch's own functions, because a file's users are counted in it. Everything that
these functions get from the trainer is checked first.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from nano_inference.loading.fields import shown
from nano_inference.loading.pickle_data import PickleError
from nano_inference.types import WeightError
from nano_inference.weights.member import first_line
from nano_inference.weights.shared_pickle import (
    BucketPart,
    CudaMemory,
    SharedFile,
    SharedTensor,
    read_bucket,
    read_tensors,
)

_SHARED_FILES = Path("/dev/shm")
_HEADER_BYTES = 64
"""Bytes before the values in a shared file, for a count of its users (torch's aten/src/ATen/MapAllocator.cpp)."""


def shared_weights(text: str, *, is_bucket: bool, field: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a trainer's pickle in base64; the tensors are views of the trainer's memory.

    `is_bucket`: the pickle is a flattened bucket; `field`: the client's name of it. The pickle is checked completely
    and all its memory opened before the first tensor. Raises `WeightError`.
    """
    try:
        if is_bucket:
            bucket, parts = read_bucket(text)
            opened = _opened([("flattened_tensor", bucket)])
            named = _cut(opened[0][1], parts)
        else:
            opened = _opened(read_tensors(text))
            named = iter(opened)
    except (PickleError, WeightError) as error:
        raise WeightError(f"{field}: {error}") from None
    yield from named
    if any(tensor.is_cuda for _, tensor in opened):
        torch.cuda.synchronize()  # the trainer may overwrite its memory once it has the reply


def _opened(named: Sequence[tuple[str, SharedTensor]]) -> list[tuple[str, Tensor]]:
    """Return views of the shared memory, all of which is checked before any is opened."""
    for _, tensor in named:
        if isinstance(tensor.storage, SharedFile):
            _check_file(tensor.storage)
        if isinstance(tensor.storage, CudaMemory) and not torch.cuda.is_available():
            raise WeightError("a tensor is in CUDA memory, but this server has no CUDA device")
    files: dict[int, torch.UntypedStorage] = {}
    found = []
    for name, tensor in named:
        try:
            found.append((name, _open(tensor, files)))
        except (RuntimeError, ValueError) as error:
            raise WeightError(f"{name}: {first_line(error)}") from None
    return found


def _open(tensor: SharedTensor, files: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a view of shared memory; `files` has the storages that are open already, by the id of their call."""
    memory = tensor.storage
    if memory is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(memory, CudaMemory):
        # Returns once the trainer's work on it so far is done.
        found: Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            *(Tensor, tensor.shape, tensor.stride, tensor.offset, torch.storage.TypedStorage, tensor.dtype),
            *(_device(memory.device), *memory.arguments),
        )
        return found
    storage = files.get(id(memory.call))
    if storage is None:
        storage = files[id(memory.call)] = reductions.rebuild_storage_filename(  # type: ignore[no-untyped-call]
            torch.UntypedStorage, memory.manager, memory.handle, memory.num_bytes
        )
    if storage.nbytes() != memory.num_bytes:
        raise ValueError("its storage has another size than announced")
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.offset, tensor.shape, tensor.stride)


def _check_file(file: SharedFile) -> None:
    """Raise `WeightError` unless the file and its manager exist, belong to this user and have the announced size.

    A file that is shorter than its mapping would end the process when it is read.
    """
    try:
        found = os.lstat(_SHARED_FILES / os.fsdecode(file.handle[1:]))
        manager = os.lstat(file.manager)
    except OSError as error:
        raise WeightError(
            f"shared memory of the trainer cannot be opened: {error.strerror}; it must run on this machine, in the "
            "same container, until the reply"
        ) from None
    if not stat.S_ISREG(found.st_mode) or not stat.S_ISSOCK(manager.st_mode):
        raise WeightError("shared memory of the trainer is not a file with a manager's socket")
    if not {found.st_uid, manager.st_uid} <= {os.geteuid(), 0}:
        raise WeightError("shared memory of the trainer belongs to another user")
    if found.st_size != file.num_bytes + _HEADER_BYTES:
        size = found.st_size - _HEADER_BYTES
        raise WeightError(f"shared memory of the trainer has {size} bytes, {file.num_bytes} were announced")


def _device(device: int | str) -> int:
    count = torch.cuda.device_count()
    if isinstance(device, int):
        if not 0 <= device < count:
            raise ValueError(f"it is on CUDA device {device}, this server sees {count}")
        return device
    for index in range(count):
        with suppress(AttributeError):  # the type of the properties has no stub of `uuid`
            if str(torch.cuda.get_device_properties(index).uuid) == device:
                return index
    raise ValueError(f"it is on the CUDA device {shown(device)}, which this server does not see")


def _cut(bucket: Tensor, parts: Sequence[BucketPart]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a contiguous 1-D bucket; copies where its bytes are not aligned, or the dtype is another."""
    for part in parts:
        if not part.start <= part.end <= bucket.numel():
            raise WeightError(f"{part.name}: is outside of its bucket")
        piece = bucket[part.start : part.end]
        if bucket.dtype == torch.uint8 and part.dtype != torch.uint8:
            if piece.numel() % part.dtype.itemsize:
                raise WeightError(f"{part.name}: {piece.numel()} bytes are no whole number of values")
            is_aligned = piece.data_ptr() % part.dtype.itemsize == 0 and part.start % part.dtype.itemsize == 0
            piece = (piece if is_aligned else piece.clone()).view(part.dtype)
        if piece.numel() != math.prod(part.shape):
            raise WeightError(f"{part.name}: {piece.numel()} values in the bucket, the shape {list(part.shape)}")
        yield part.name, piece.to(part.dtype).view(part.shape)
