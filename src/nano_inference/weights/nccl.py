"""NCCL through ctypes, for trainers with vLLM's communicator, not torch's process groups: TRL, prime-rl, PipelineRL.

Names, types and numbers are those of nccl.h (2.x). vLLM's StatelessProcessGroup (vllm/distributed/utils.py) is a
`TCPStore` without a prefix, hosted by rank 0. Its PyNcclCommunicator (device_communicators/pynccl.py) gets from there,
under `broadcast_from/0/0`, NCCL's unique id as a pickled ctypes structure, joins the NCCL communicator and adds up one
float32 zero. From then on the trainer broadcasts.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nano_inference.loading.pickle_data import Named, PickleError, name_of, read_data
from nano_inference.types import WeightError
from nano_inference.weights.member import Place
from nano_inference.weights.plain import PlainGroup

UNIQUE_ID_BYTES = 128
_SUM = 0
_DTYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {
        torch.int8: 0,
        torch.uint8: 1,
        torch.int32: 2,
        torch.int64: 4,
        torch.float16: 6,
        torch.float32: 7,
        torch.float64: 8,
        torch.bfloat16: 9,
    }
)
"""Values of ncclDataType_t."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
        "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
        "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
        "ncclCommAbort": (_POINTER,),
    }
)
"""Arguments of the functions that return ncclResult_t."""


def find_library() -> str:
    """Return the file of libnccl that torch's CUDA wheels depend on, or else the name for the system's search."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    places = [] if found is None else list(found.submodule_search_locations or [])
    files = (Path(place) / "lib" / "libnccl.so.2" for place in places)
    return next((str(file) for file in files if file.is_file()), "libnccl.so.2")


_REBUILD = "_ctypes _unpickle"
_CLASSES = frozenset(
    f"{package}.distributed.device_communicators.pynccl_wrapper ncclUniqueId"
    for package in ("vllm", "vllm.backends", "sglang.srt")
)
_GPU = torch.device("cuda")


def stateless_group(place: Place, device: torch.device = _GPU, library: str | None = None) -> PlainGroup:
    """Join a trainer's group, which has the timeout for its store, and for the others in NCCL.

    `device` has the received tensors; `library` is the file of libnccl. Raises `ValueError` naming the field,
    `WeightError` if the group is not complete in time.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend: nccl needs a CUDA device; on a CPU send weights by a directory or gloo")
    place.await_host()
    try:
        unique_id = read_unique_id(place.store().get("broadcast_from/0/0"))
    except PickleError as error:
        where = f"{place.address}:{place.port}"
        raise WeightError(f"the trainer at {where} sent no unique id of NCCL: {error}") from None
    except (RuntimeError, ValueError) as error:
        raise place.failed(error) from error
    rank, world_size = place.rank, place.world_size
    return PlainGroup(Communicator(unique_id, rank=rank, world_size=world_size, device=device, library=library))


class Communicator:
    """Owns one rank of an NCCL communicator, and the CUDA stream of its operations."""

    def __init__(
        self, unique_id: bytes, *, rank: int, world_size: int, device: torch.device, library: str | None = None
    ) -> None:
        """Join the communicator; return when all ranks have. Then add up one zero, as vLLM's ranks do.

        `library` is the file of libnccl. Raises `WeightError` if it cannot be loaded, or NCCL reports an error. NCCL
        waits without a limit for ranks that do not come.
        """
        self._library = _load(library or find_library())
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """A stream of its own: a broadcast whose sender died must not block the engine's."""
        self._communicator = _POINTER()
        shared = _UniqueId.from_buffer_copy(unique_id)
        with self._on_device():
            self._call("ncclCommInitRank", ctypes.byref(self._communicator), world_size, shared, rank)
        try:
            zero = torch.zeros(1, dtype=torch.float32, device=device)
            place, kind = zero.data_ptr(), _DTYPES[zero.dtype]
            with self._on_stream() as stream:
                self._call("ncclAllReduce", place, place, 1, kind, _SUM, self._communicator, stream)
        except BaseException:
            self.close()
            raise

    def broadcast(self, data: Tensor) -> None:
        """Receive rank 0's array into a contiguous tensor; wait for its end. See `Channel`.

        Sizes are not compared: an array of another size blocks until the group is left, or leaves random values.
        """
        kind = _DTYPES.get(data.dtype)
        try:
            if kind is None or not data.is_contiguous() or data.device.type != self.device.type:
                raise WeightError(f"no NCCL broadcast of a {data.dtype} tensor on {data.device}")
            with self._on_stream() as stream:
                place = data.data_ptr()
                self._call("ncclBroadcast", place, place, data.numel(), kind, 0, self._communicator, stream)
            if not self._communicator:
                raise WeightError("the group was left during a broadcast")  # which may have ended early, without error
        except BaseException:
            self.close()
            raise

    def close(self, *, is_receiving: bool = False) -> None:
        """Leave the communicator, also while another thread waits for a broadcast. Can be called again.

        ncclCommDestroy waits for the other ranks of a machine, which trainers let end by themselves.
        """
        communicator, self._communicator = self._communicator, _POINTER()
        if communicator:
            self._library["ncclCommAbort"](communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        if result := self._library[name](*arguments):
            text = self._library["ncclGetErrorString"](result)
            raise WeightError(f"{name}: {(text or b'unknown error').decode('utf-8', 'replace')} (NCCL error {result})")

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                yield
        else:
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[int | None]:
        """Yield the stream's address, after earlier work on the caller's stream; wait for its work at the end."""
        if self._stream is None:
            yield None
            return
        with self._on_device():
            self._stream.wait_stream(torch.cuda.current_stream())
            yield self._stream.cuda_stream
            self._stream.synchronize()


def _load(path: str) -> Mapping[str, Any]:
    try:
        library = ctypes.CDLL(path)
        functions: dict[str, Any] = {name: getattr(library, name) for name in (*_FUNCTIONS, "ncclGetErrorString")}
    except (OSError, AttributeError) as error:
        raise WeightError(f"NCCL cannot be loaded from {path}: {error}") from None
    for name, arguments in _FUNCTIONS.items():
        functions[name].argtypes, functions[name].restype = arguments, _INT
    functions["ncclGetErrorString"].argtypes, functions["ncclGetErrorString"].restype = (_INT,), ctypes.c_char_p
    return functions


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
