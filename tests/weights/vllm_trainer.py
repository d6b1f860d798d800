"""A trainer process with vLLM's rendezvous and NCCL by ctypes, for host memory with the library of `nccl_stub.c`."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nano_inference.executors.cpu.compile import find_compiler
from tests.weights.names import importable_as
from tests.weights.plain_trainer import Broadcast, Named, Trainer, trainer_process

CODES = {torch.uint8: 1, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
WRAPPER = "vllm.distributed.device_communicators.pynccl_wrapper"


class ncclUniqueId(ctypes.Structure):
    """NCCL's unique id, under whose name in vLLM it is pickled."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def compile_stub(folder: Path) -> str:
    """Return the library compiled from `nccl_stub.c`."""
    target = folder / "libnccl-stub.so"
    source = Path(__file__).with_name("nccl_stub.c")
    command = [find_compiler(os.environ), "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", target, source]
    subprocess.run(command, check=True)
    return str(target)


def pickled_id(data: bytes, module: str = WRAPPER) -> bytes:
    """Return a unique id pickled as vLLM does."""
    with importable_as(module, ncclUniqueId):
        return pickle.dumps(ncclUniqueId.from_buffer_copy(data))


class Rank0:
    """The trainer's side of a group: a store without a prefix, a unique id in it, and NCCL's communicator."""

    def __init__(
        self, library: str, port: int, world_size: int, value: bytes | None = None, device: str = "cpu"
    ) -> None:
        """Host the store; with `value` only put that in place of the unique id."""
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._nccl = ctypes.CDLL(library)
        self.store = dist.TCPStore(
            "127.0.0.1", port, world_size, is_master=True, timeout=timedelta(seconds=60), use_libuv=False
        )
        shared = ncclUniqueId()
        assert self._nccl.ncclGetUniqueId(ctypes.byref(shared)) == 0
        self.store.set("broadcast_from/0/0", pickled_id(bytes(shared)) if value is None else value)
        if value is not None:
            return
        self._communicator = ctypes.c_void_p()
        assert self._nccl.ncclCommInitRank(ctypes.byref(self._communicator), world_size, shared, 0) == 0
        zero = torch.zeros(1, device=self._device)
        place = ctypes.c_void_p(zero.data_ptr())
        assert self._nccl.ncclAllReduce(place, place, ctypes.c_size_t(1), 7, 0, self._communicator, None) == 0
        assert zero.item() == 0

    def broadcast(self, data: torch.Tensor) -> None:
        data = data.contiguous().to(self._device)
        place, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
        assert self._nccl.ncclBroadcast(place, place, count, CODES[data.dtype], 0, self._communicator, None) == 0
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def join_stub(folder: str, *place: Any) -> Broadcast:
    """Return the broadcast of a group whose pipes are in a folder."""
    os.environ["NCCL_STUB_FOLDER"] = folder
    return Rank0(*place).broadcast


def vllm_trainer(named: Named, folder: Path, library: str) -> AbstractContextManager[Trainer]:
    """Run a trainer with these tensors during the block."""
    return trainer_process(named, folder, partial(join_stub, str(folder), library))
