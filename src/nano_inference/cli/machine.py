"""What this machine is, and two short measurements of it."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
LIBRARIES = (
    "torch",
    "safetensors",
    "tokenizers",
    "tiktoken",
    "gguf",
    "minijinja",
    "huggingface-hub",
    "rich",
    "cyclopts",
    "numpy",
)
_READ_FLOATS = 64 << 20
_GEMM_SIZE = 1024


def processor() -> dict[str, Any]:
    """Return the processor's name, the instruction sets that matter here, cores and threads."""
    info = _cpuinfo()
    present = set(info.get("flags", info.get("Features", "")).split())
    return {
        "name": info.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in present],
        "threads": os.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _cpuinfo() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; nothing where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first, _, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def limits(root: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Return what a container allows, None where it sets no limit: processors' worth of time, and bytes."""
    quota = _words(root / "cpu.max") or [
        *_words(root / "cpu/cpu.cfs_quota_us"),
        *_words(root / "cpu/cpu.cfs_period_us"),
    ]
    memory = _words(root / "memory.max") or _words(root / "memory/memory.limit_in_bytes")
    has_quota = len(quota) == 2 and quota[0].isdigit()
    return {
        "cgroup_processors": int(quota[0]) / int(quota[1]) if has_quota else None,
        "cgroup_memory_bytes": int(memory[0]) if memory and memory[0].isdigit() and int(memory[0]) < 1 << 60 else None,
    }


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


def free_disk(directory: Path) -> int | None:
    """Return the bytes that are free where a directory is, or will be."""
    here = next((place for place in (directory, *directory.absolute().parents) if place.exists()), None)
    return None if here is None else shutil.disk_usage(here).free


def gpus() -> list[str]:
    """Return the names of the CUDA devices that torch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def libraries() -> dict[str, str]:
    """Return the installed versions of the libraries that this package stands on."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def read_bandwidth() -> float:
    """Measure how many bytes a second torch reads from memory: the sum of 256 MB, the best of a few."""
    data = torch.ones(_READ_FLOATS)
    return data.numel() * data.element_size() / _best_time(lambda: data.sum(), 0.5)


def gemm_rate() -> float:
    """Measure float32 operations a second of a matrix product of 1024 by 1024, the best of a few."""
    left, right = torch.ones(_GEMM_SIZE, _GEMM_SIZE), torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    return 2.0 * _GEMM_SIZE**3 / _best_time(lambda: left @ right, 0.5)


def _best_time(work: Callable[[], object], budget: float) -> float:
    """Return the shortest time of one call, over calls that take `budget` seconds together, and three at least."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
