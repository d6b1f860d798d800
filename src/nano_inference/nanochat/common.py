"""Upstream's `nanochat.common`: the functions that inference and its scripts use."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from nano_inference.assemble import environment
from nano_inference.executors.devices import pick_device
from nano_inference.nanochat.files import nanochat_home
from nano_inference.nanochat.peaks import get_peak_bandwidth, get_peak_flops

__all__ = [
    "DummyWandb",
    "autodetect_device_type",
    "base_path",
    "compute_cleanup",
    "compute_init",
    "get_base_dir",
    "get_dist_info",
    "get_peak_bandwidth",
    "get_peak_flops",
    "is_ddp_initialized",
    "is_ddp_requested",
    "print0",
]
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that torchrun sets."""


def get_base_dir() -> str:
    """Return nanochat's base directory: `NANOCHAT_BASE_DIR`, else ~/.cache/nanochat. It is not created."""
    return str(base_path(None))


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
    rank, local_rank, world_size = (_integer(name) for name in _RANKS)
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


def print0(s: str = "", end: str = "\n", flush: bool = False) -> None:
    """Print `s` in the process of rank 0."""
    if get_dist_info()[1] == 0:
        print(s, end=end, flush=flush)


class DummyWandb:
    """A run of Weights & Biases that records nothing."""

    def log(self, *values: object, **options: object) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def base_path(directory: str | Path | None) -> Path:
    """Return the given base directory, or nanochat's."""
    return nanochat_home(environment()) if directory is None else Path(directory)


def _integer(name: str) -> int:
    text = environment()[name]
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number from 0, got {text[:80]!r}")
    return int(text)
