"""Facts about this machine."""

from __future__ import annotations

import os
import platform
import shutil
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
    "jinja2",
    "huggingface-hub",
    "rich",
    "cyclopts",
    "numpy",
)


def processor() -> dict[str, Any]:
    """Return the processor's name, those of its instruction sets that kernels use, and thread counts."""
    info = _cpuinfo()
    present = set(info.get("flags", info.get("Features", "")).split())
    return {
        "name": info.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in present],
        "threads": os.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _cpuinfo() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; empty if there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first, _, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def limits(root: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Return the limits of this process's cgroup: processors and bytes, None without a limit."""
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
    """Return the free bytes of the file system of a directory, which may not exist yet."""
    here = next((place for place in (directory, *directory.absolute().parents) if place.exists()), None)
    return None if here is None else shutil.disk_usage(here).free


def gpus() -> list[str]:
    """Return the names of the CUDA devices that torch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def libraries() -> dict[str, str]:
    """Return the installed versions of the main dependencies."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
