"""`doctor`: facts for a bug report, and the models that fit in this machine's memory."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from rich.filesize import decimal

import nano_inference
from nano_inference.build import kernels_here
from nano_inference.cli import estimate
from nano_inference.cli.arguments import ENV_PREFIX
from nano_inference.cli.config_file import default_file
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of
from nano_inference.cli.shells import installed
from nano_inference.cli.terminal import print_rows
from nano_inference.executors.devices import available_memory, free_bytes
from nano_inference.loading.catalog import WHEELS, list_models

_HEAD = ["model", "precision", "weights", "KV a token", "KV of context", "KV budget", "fits"]
_NOTE = (
    "KV budget: capacity of the KV cache in tokens without --kv-cache-bytes. Fits: the weights and the KV cache of\n"
    "one whole context fit in the memory that is free now."
)


def run(as_json: bool, common: Common) -> int:
    """Print the facts."""
    facts = examine(cache_of(common), common.config)
    if as_json:
        print(json.dumps(facts))
        return 0
    for heading, part in facts.items():
        print(heading)
        if isinstance(part, list):
            print_rows(_HEAD, map(_cells, part))
        else:
            print("\n".join(f"  {key.replace('_', ' '):<26}{_shown(key, value)}" for key, value in part.items()))
    print(_NOTE)
    return 0


def examine(cache: Path, config: Path | None = None) -> dict[str, Any]:
    """Return facts as JSON values: each heading has a dictionary, or a list of rows."""
    kernels = kernels_here()
    entries, own = list_models(cache), default_file(os.environ)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    basis = estimate.Machine(
        available=available_memory(),
        kv_budget=free_bytes(torch.device("cpu"), 0.9),
        has_kernels=kernels["code"] != "torch",
    )
    return {
        "system": {
            "nano_inference": nano_inference.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "processor": processor() | limits(),
        "memory": {"total_bytes": total, "available_bytes": basis.available},
        "torch": {"threads": torch.get_num_threads(), "cuda_devices": devices},
        "kernels": kernels,
        "libraries": {name: _version(name) for name in LIBRARIES},
        "settings": {
            "config_files": [str(path) for path in (config, own if own.exists() else None) if path is not None],
            "environment": sorted(name for name in os.environ if name.startswith(ENV_PREFIX)),
            "completion": installed(Path.home()),
        },
        "models": {
            "cache": str(cache),
            "cache_free_bytes": free_disk(cache),
            "hub_offline": bool(constants.HF_HUB_OFFLINE),
            "kv_budget_bytes": basis.kv_budget,
            "here": [entry.name for entry in entries],
        },
        "default model": {"name": WHEELS[0].name, "here": any(entry.name == WHEELS[0].name for entry in entries)},
        "models here": estimate.of_models(entries, basis),
        "typical sizes": estimate.of_sizes(basis),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of an estimate."""
    name = row.get("model") or row["size"]
    if "problem" in row:
        return [name, row["problem"]]
    return [
        *(name, row["precision"], decimal(row["weight_bytes"]), decimal(row["kv_bytes_per_token"])),
        f"{decimal(row['context_kv_bytes'])} / {row['context']}",
        *(f"{row['kv_budget_tokens']:,}", "yes" if row["fits"] else "no"),
    ]


def _shown(key: str, value: Any) -> str:
    """Format one fact."""
    if value is None:
        return "no limit" if key.startswith("cgroup") else "unknown"
    if isinstance(value, bool) and key != "here":
        return "yes" if value else "no"
    if isinstance(value, bool):
        return "yes" if value else "no (`nano-inference models pull default` fetches it)"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if "bytes" in key:
        return decimal(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
LIBRARIES = (
    *("torch", "safetensors", "tokenizers", "tiktoken", "gguf", "jinja2", "huggingface-hub"),
    *("rich", "cyclopts", "numpy"),
)


def processor() -> dict[str, Any]:
    """Return the processor's name, those of its instruction sets that kernels use, and thread counts."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())  # of the first processor
    info = {key.strip(): value.strip() for key, _, value in pairs}
    present = set(info.get("flags", info.get("Features", "")).split())
    return {
        "name": info.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in present],
        "threads": os.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


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


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
