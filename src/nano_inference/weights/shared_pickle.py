"""Weights as handles of memory that a trainer on the same machine shares, in the pickles of SGLang's trainers.

SGLang's MultiprocessingSerializer (sglang/srt/utils/common.py) is `ForkingPickler` and base64. It pickles a list of
(name, tensor), whose tensors may be `LocalSerializedTensor`s, each with a pickled tensor per rank
(sglang/srt/weight_sync/utils.py); or, as `flattened_bucket`, a dict of one tensor and the `FlattenedTensorMetadata` of
its parts (sglang/srt/weight_sync/tensor_bucket.py). A tensor is a call of a function of torch/multiprocessing/
reductions.py (2.13): on the CPU `rebuild_tensor(class, storage, (offset, size, stride, requires_grad))`, on CUDA
`rebuild_cuda_tensor` with 15 arguments, for which SGLang puts a wrapper of its own, with the device's UUID in place of
its number (sglang/srt/utils/patch_torch.py).

The pickles are read as data: nothing here opens memory.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from nano_inference.loading.pickle_data import Named, PickleError, name_of, read_data
from nano_inference.loading.pieces import DTYPES

_REDUCTIONS = "torch.multiprocessing.reductions"
_TENSOR = f"{_REDUCTIONS} rebuild_tensor"
_TYPED = f"{_REDUCTIONS} rebuild_typed_storage"
_FILE, _FD, _EMPTY = (f"{_REDUCTIONS} rebuild_storage_{kind}" for kind in ("filename", "fd", "empty"))
_CUDA = frozenset(
    {
        f"{_REDUCTIONS} rebuild_cuda_tensor",
        "sglang.srt.utils.patch_torch _rebuild_cuda_tensor_modified",
        "sglang.srt.patch_torch _rebuild_cuda_tensor_modified",
    }
)
SIZE = "torch Size"
_UNTYPED = "torch.storage UntypedStorage"
_CLASSES = frozenset({"torch Tensor", "torch.nn.parameter Parameter"})
_RUNNER = "sglang.srt.model_executor.model_runner"
_METADATA = frozenset(
    f"{module} FlattenedTensorMetadata" for module in ("sglang.srt.weight_sync.tensor_bucket", _RUNNER)
)
_PART_FIELDS = frozenset({"name", "shape", "dtype", "start_idx", "end_idx"})
_LOCAL = frozenset(f"{module} LocalSerializedTensor" for module in (_RUNNER, f"{_RUNNER}_components.weight_updater"))
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {f"torch {name}": dtype for name, dtype in DTYPES.items()} | {"torch uint8": torch.uint8}
)
_NAMES = frozenset(
    {_TENSOR, _TYPED, _FILE, _FD, _EMPTY, SIZE, _UNTYPED, "torch.storage TypedStorage"}
    | {"multiprocessing.resource_sharer DupFd"}
    | {*_CUDA, *_CLASSES, *_METADATA, *_LOCAL, *_DTYPES}
)
"""All that a pickle may name."""
_MAX_DIMS, _MAX_NAME = 8, 512
_MAX_HANDLE = 4096  # most bytes of a CUDA handle; those of memory that can grow have many parts
_HANDLE = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,10}_[0-9]{1,10}")
_MANAGER = re.compile(rb"/[^\0]{1,200}/torch-shm-dir-[A-Za-z0-9]{6}/manager\.sock")
_CUDA_KINDS = (
    *(type, object, object, int, type, type, int | str, bytes, int, int, bool),
    *(bytes, int, bytes, bool),
)
"""Types of the arguments of `rebuild_cuda_tensor`: class, size, stride, offset, storage class, dtype, device, handle,
bytes and offset of the storage, requires_grad, handle and offset of its reference counter, event, whether to wait for
it."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedFile:
    """A storage in a file of shared memory."""

    manager: bytes  # socket of the process that deletes the file when its users have died
    handle: bytes
    num_bytes: int
    call: Named  # its call in the pickle: tensors may share it, and torch counts users of a file by calls


@dataclass(frozen=True, slots=True, eq=False)
class CudaMemory:
    """A storage in the CUDA memory of another process."""

    device: int | str  # number or UUID
    num_bytes: int
    arguments: tuple[Any, ...]  # those of `rebuild_cuda_tensor` after the device


@dataclass(frozen=True, slots=True, eq=False)
class SharedTensor:
    """A tensor in shared memory. Raises `PickleError` unless all its elements are in its storage."""

    storage: SharedFile | CudaMemory | None  # None if it has no values
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise PickleError("a tensor's size and strides differ in length")
        if math.prod(self.shape):
            steps = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            end = (self.offset + steps + 1) * self.dtype.itemsize
            if end > (self.storage.num_bytes if self.storage else 0):
                raise PickleError("a tensor is larger than its storage")


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A tensor in a flattened bucket: `start` to `end` are bytes if the bucket's dtype is uint8, else elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_bucket(text: str) -> tuple[SharedTensor, list[BucketPart]]:
    """Return the tensor of a flattened bucket and its parts, from a pickle in base64. Raises `PickleError`."""
    tree = read_data(_decoded(text), _NAMES)
    if not isinstance(tree, dict) or set(tree) != {"flattened_tensor", "metadata"}:
        raise PickleError("load_format flattened_bucket needs a dict of flattened_tensor and metadata")
    if not isinstance(tree["metadata"], list):
        raise PickleError("metadata must be a list")
    bucket = _tensor(tree["flattened_tensor"])
    if len(bucket.shape) != 1 or bucket.stride != (1,):  # strides can make it larger than its storage
        raise PickleError("flattened_tensor must be one-dimensional and contiguous")
    parts = []
    for one in tree["metadata"]:
        state = one.state if isinstance(one, Named) and one.name in _METADATA else None
        if not isinstance(state, dict) or not state.keys() >= _PART_FIELDS:
            raise PickleError("an entry of metadata is not a FlattenedTensorMetadata")
        start, end = _count(state["start_idx"]), _count(state["end_idx"])
        parts.append(
            BucketPart(read_name(state["name"]), _dtype(state["dtype"]), read_shape(state["shape"]), start, end)
        )
    return bucket, parts


def read_tensors(text: str) -> list[tuple[str, SharedTensor]]:
    """Return the names and tensors of a pickle in base64. Raises `PickleError`.

    A pickle inside it that has several names is read once, and its tensor returned for each of them.
    """
    tree = read_data(_decoded(text), _NAMES)
    tree = list(tree.items()) if isinstance(tree, dict) else tree  # of adapters
    if not isinstance(tree, list):
        raise PickleError("it must be a list of (name, tensor), or a bucket with load_format flattened_bucket")
    found = []
    inner: dict[int, SharedTensor] = {}  # by the ids of the pickles inside, which `tree` keeps alive
    for item in tree:
        if not isinstance(item, tuple) or len(item) != 2:
            raise PickleError("an entry is not a pair of a name and a tensor")
        name, value = read_name(item[0]), item[1]
        if not isinstance(value, Named) or value.name not in _LOCAL:
            found.append((name, _tensor(value)))
            continue
        values = value.state.get("values") if isinstance(value.state, dict) else None
        if not isinstance(values, list) or not all(isinstance(one, bytes) for one in values):
            raise PickleError("a value is neither a tensor nor a LocalSerializedTensor")
        if len(values) != 1:
            raise PickleError(f"a LocalSerializedTensor has {len(values)} values; this server is one rank")
        if id(values[0]) not in inner:
            inner[id(values[0])] = _tensor(read_data(values[0], _NAMES))
        found.append((name, inner[id(values[0])]))
    return found


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise PickleError("it is not base64") from None


def _tensor(value: Any) -> SharedTensor:
    """Return the tensor that a call would rebuild. Nothing stays unchecked: it could be of any size."""
    form = "a value is not a tensor in shared memory"
    if not isinstance(value, Named):
        raise PickleError(form)
    if value.name in _CUDA:
        return _cuda_tensor(value.arguments)
    match value.arguments:
        case (kind, Named(name=typed) as storage, (offset, size, stride, bool())) if (
            value.name == _TENSOR and name_of(kind) in _CLASSES and typed == _TYPED and len(storage.arguments) == 2
        ):
            memory, dtype = storage.arguments
            return SharedTensor(_storage(memory), _dtype(dtype), _count(offset), read_shape(size), _counts(stride))
    raise PickleError(f"{form}: {value.name} must have a class, a storage and (offset, size, strides, requires_grad)")


def _storage(call: Any) -> SharedFile | None:
    if not isinstance(call, Named) or not call.arguments or name_of(call.arguments[0]) != _UNTYPED:
        raise PickleError("a storage is of another class than UntypedStorage")
    match call.name, *call.arguments[1:]:
        case ("torch.multiprocessing.reductions rebuild_storage_empty",):
            return None
        case ("torch.multiprocessing.reductions rebuild_storage_filename", bytes(manager), bytes(handle), num_bytes):
            if not _HANDLE.fullmatch(handle):
                raise PickleError("the name of a shared file is not one that torch gives")
            if not _MANAGER.fullmatch(manager) or b"/../" in manager:
                raise PickleError("the socket of a shared file's manager is not one that torch makes")
            return SharedFile(manager, handle, _count(num_bytes), call)
    if call.name == _FD:
        raise PickleError(
            "a tensor is shared by a file descriptor, which cannot reach an unrelated process: call "
            "torch.multiprocessing.set_sharing_strategy('file_system') in the trainer"
        )
    raise PickleError(f"{call.name} does not rebuild a storage")


def _cuda_tensor(arguments: tuple[Any, ...]) -> SharedTensor:
    is_known = len(arguments) == len(_CUDA_KINDS) and all(map(isinstance, arguments, _CUDA_KINDS))
    if not is_known or name_of(arguments[0]) not in _CLASSES:
        raise PickleError("the arguments of rebuild_cuda_tensor are not those of torch")
    shape, stride, offset, _, dtype, device, handle, num_bytes, start, _, counter, counter_offset, event, waits = (
        arguments[1:]
    )
    if max(len(handle), len(event)) > _MAX_HANDLE or not _HANDLE.fullmatch(counter):
        raise PickleError("a CUDA handle is too long, or its reference counter is not one that torch makes")
    rest = (handle, _count(num_bytes), _count(start), False, counter, _count(counter_offset), event, waits)
    memory = CudaMemory(device, num_bytes, rest)
    return SharedTensor(memory, _dtype(dtype), _count(offset), read_shape(shape), _counts(stride))


def _dtype(value: Any) -> torch.dtype:
    if name_of(value) not in _DTYPES:
        raise PickleError("a dtype is not one of float64, float32, float16, bfloat16 and uint8")
    return _DTYPES[name_of(value)]


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise PickleError("a size or an offset is not a number of at least 0")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        raise PickleError("a size or strides are not numbers")
    if len(value) > _MAX_DIMS:  # a product takes quadratic time
        raise PickleError(f"a tensor may have at most {_MAX_DIMS} dimensions, got {len(value)}")
    return tuple(_count(one) for one in value)


def read_shape(value: Any) -> tuple[int, ...]:
    """Return the sizes of a `torch.Size`, pickled as a call with a tuple, or of a sequence. Raises `PickleError`."""
    is_size = isinstance(value, Named) and value.name == SIZE and len(value.arguments) == 1
    return _counts(value.arguments[0] if is_size else value)


def read_name(value: Any) -> str:
    """Return a tensor's name. Raises `PickleError`."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise PickleError(f"a tensor's name must be text of 1 to {_MAX_NAME} characters")
    return value
