"""Devices and threads, their precisions, and how much of their memory a KV cache may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nano_inference.config import Dtype, EngineConfig

_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPU_SHARE = 4  # the default KV cache on a CPU is at most one part in 4 of the available memory
_CPU_LIMIT = 4 << 30


def pick_device(name: str) -> torch.device:
    """Return the device with this name; "auto" is CUDA if available, else CPU. Raises `ValueError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name!r}: torch sees no Apple GPU")
    return device


def pick_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for torch; "auto" is float32 on a CPU and bfloat16 on CUDA.

    Raises `ValueError` for int8, which requires the CPU kernels.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype {name}: requires the CPU kernels")
    return _DTYPES[name]


def rank_device(name: str, local_rank: int, num_local: int) -> torch.device:
    """Return the device of one of the ranks on this machine: CUDA devices are given out in order.

    Raises `ValueError` if the ranks are more than the devices, or for a device that ranks cannot use.
    """
    device = pick_device(name)
    if device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise ValueError(f"tensor_parallel: device must be auto, cpu or cuda, got {name!r}")
    count = torch.cuda.device_count()
    if num_local > count:
        raise ValueError(f"tensor_parallel: {num_local} ranks need as many CUDA devices, torch sees {count}")
    return torch.device("cuda", local_rank)


def set_threads(config: EngineConfig) -> None:
    """Set torch's number of threads; ranks share the machine's by default."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif config.tensor_parallel > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.tensor_parallel))


def free_bytes(device: torch.device, share: float) -> int:
    """Return the default size of the KV cache in bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * share) - (total - free))
    return min(available_memory() // _CPU_SHARE, _CPU_LIMIT)


def release_unused(device: torch.device) -> None:
    """Return the memory that torch keeps for later tensors to a GPU's driver, for other processes and allocators."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_memory() -> int:
    """Return the bytes of main memory available without swapping; 4 GiB if the system does not report it."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 << 30
