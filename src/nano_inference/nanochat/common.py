"""Upstream's `nanochat.common`: the functions that inference and its scripts use."""

from __future__ import annotations

import logging
import math
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import torch
from torch import distributed

from nano_inference.build import environment
from nano_inference.executors.devices import pick_device
from nano_inference.nanochat.files import nanochat_home

__all__ = [
    "COMPUTE_DTYPE",
    "COMPUTE_DTYPE_REASON",
    "DummyWandb",
    "autodetect_device_type",
    "base_path",
    "compute_cleanup",
    "compute_init",
    "download_file_with_lock",
    "get_base_dir",
    "get_dist_info",
    "get_peak_bandwidth",
    "get_peak_flops",
    "is_ddp_initialized",
    "is_ddp_requested",
    "print0",
    "print_banner",
    "setup_default_logging",
]
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables that torchrun sets


def _compute_dtype() -> tuple[torch.dtype, str]:
    """Return `NANOCHAT_DTYPE`, else bfloat16 on GPUs that have it, else float32, and the reason.

    Raises `ValueError` for an unknown name.
    """
    name = environment().get("NANOCHAT_DTYPE")
    if name is not None:
        known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        if name not in known:
            raise ValueError(f"NANOCHAT_DTYPE must be one of {', '.join(known)}, got {name[:80]!r}")
        return known[name], f"set by NANOCHAT_DTYPE={name}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return torch.bfloat16, "a GPU with bfloat16"
    return torch.float32, "no GPU with bfloat16"


COMPUTE_DTYPE, COMPUTE_DTYPE_REASON = _compute_dtype()  # precision in which upstream's model computes, and why


def get_base_dir() -> str:
    """Return nanochat's base directory: `NANOCHAT_BASE_DIR`, else ~/.cache/nanochat. Creates it."""
    base_path(None).mkdir(parents=True, exist_ok=True)
    return str(base_path(None))


def download_file_with_lock(url: str, filename: str, postprocess_fn: Callable[[str], object] | None = None) -> str:
    """Download a file into the base directory unless it is there; return its path.

    One process downloads, and calls `postprocess_fn` with the path; others wait for it. An interrupted download leaves
    no file.
    """
    from filelock import FileLock  # a dependency of torch

    path = Path(get_base_dir(), filename)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            print(f"Downloading {url}...")
            partial = path.with_name(f"{path.name}.partial")
            with urllib.request.urlopen(url) as response:
                partial.write_bytes(response.read())
            partial.replace(path)
            if postprocess_fn is not None:
                postprocess_fn(str(path))
    return str(path)


def setup_default_logging() -> None:
    """Log from level INFO on to stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s")


def print_banner() -> None:
    """Print the name in the process of rank 0."""
    print0("nanochat, with nano-inference\n")


def autodetect_device_type() -> str:
    """Return "cuda" if torch finds such a device, else "cpu". (Apple's mps is not supported.)"""
    return pick_device("auto").type


def is_ddp_requested() -> bool:
    """Return whether torchrun started this process."""
    return all(environment().get(name) for name in _RANKS)


def is_ddp_initialized() -> bool:
    """Return whether there is a process group."""
    return bool(distributed.is_available() and distributed.is_initialized())


def get_dist_info() -> tuple[bool, int, int, int]:
    """Return (is distributed, rank, local rank, number of ranks) as torchrun says, else those of a single process.

    Raises `ValueError` naming a variable that is not an integer.
    """
    if not is_ddp_requested():
        return False, 0, 0, 1
    texts = [environment()[name] for name in _RANKS]
    for name, text in zip(_RANKS, texts, strict=True):
        if not text.isdecimal():
            raise ValueError(f"{name} must be a number from 0, got {text[:80]!r}")
    rank, local_rank, world_size = map(int, texts)
    return True, rank, local_rank, world_size


def compute_init(device_type: str = "cuda") -> tuple[bool, int, int, int, torch.device]:
    """Return (is distributed, rank, local rank, number of ranks, device).

    Sets the global seed to 42, as upstream. Under torchrun on CUDA, the device is that of the local rank, and a process
    group with NCCL is created. Raises `ValueError` for a missing device.
    """
    is_distributed, rank, local_rank, world_size = get_dist_info()
    is_grouped = is_distributed and device_type == "cuda"
    device = pick_device(f"cuda:{local_rank}" if is_grouped else device_type)
    torch.manual_seed(42)
    if is_grouped:
        torch.cuda.set_device(device)
        distributed.init_process_group(backend="nccl", device_id=device)
        distributed.barrier()
    return is_distributed, rank, local_rank, world_size, device


def compute_cleanup() -> None:
    """Destroy the process group, if there is one."""
    if is_ddp_initialized():
        distributed.destroy_process_group()


def print0(
    s: object = "", *, sep: str | None = None, end: str | None = None, file: TextIO | None = None, flush: bool = False
) -> None:
    """Print `s` in the process of rank 0."""
    if get_dist_info()[1] == 0:
        print(s, sep=sep, end=end, file=file, flush=flush)


class DummyWandb:
    """A run of Weights & Biases that records nothing."""

    def log(self, *values: object, **options: object) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def base_path(directory: str | Path | None) -> Path:
    """Return the given base directory, or nanochat's."""
    return nanochat_home(environment()) if directory is None else Path(directory)


_log = logging.getLogger("nano_inference.nanochat")


PEAKS: Mapping[str, tuple[float, float]] = {
    **{"gb200": (2.5e15, 8e12), "grace blackwell": (2.5e15, 8e12), "b200": (2.25e15, 8e12), "b100": (1.8e15, 8e12)},
    **{"h200 nvl": (836e12, 4.8e12), "h200 pcie": (836e12, 4.8e12), "h200": (989e12, 4.8e12)},
    **{"h100 nvl": (835e12, 3.9e12), "h100 pcie": (756e12, 2e12), "h100": (989e12, 3.35e12)},
    **{"h800 nvl": (989e12, 3.35e12), "h800 pcie": (756e12, 2e12), "h800": (756e12, 3.35e12)},
    **{"a100": (312e12, 2e12), "a800": (312e12, 2e12), "a40": (149.7e12, 696e9), "a30": (165e12, 933e9)},
    **{"l40s": (362e12, 864e9), "l40-s": (362e12, 864e9), "l40 s": (362e12, 864e9), "l4": (121e12, 300e9)},
    **{"mi355": (2.5e15, 8e12), "mi325": (1.3074e15, 6e12), "mi300x": (1.3074e15, 5.3e12)},
    **{"mi300a": (980.6e12, 5.3e12), "mi250x": (383e12, 3.28e12), "mi250": (362.1e12, 3.28e12)},
    **{"5090": (209.5e12, 1.79e12), "4090": (165.2e12, 1.01e12), "3090": (71e12, 936e9)},
}
"""Words in a GPU's name -> dense bfloat16 operations and bytes of memory per second. The first that matches counts."""


def get_peak_flops(device_name: str) -> float:
    """Return a GPU's dense bfloat16 operations per second, infinity with a warning for an unknown one."""
    return _peak(device_name, "flops")[0]


def get_peak_bandwidth(device_name: str) -> float:
    """Return a GPU's bytes of memory per second, infinity with a warning for an unknown one."""
    return _peak(device_name, "bandwidth")[1]


def _peak(device_name: str, field: str) -> tuple[float, float]:
    for words, peak in PEAKS.items():
        if all(word in device_name.lower() for word in words.split()):
            return peak
    _log.warning("the peak %s of %r is not known: shares of it are 0%%", field, device_name)
    return math.inf, math.inf
