"""Upstream's `nanochat.common`: the functions that inference uses."""

from __future__ import annotations

from pathlib import Path

import torch

from nano_inference.assemble import environment
from nano_inference.executors.devices import pick_device
from nano_inference.nanochat.files import nanochat_home


def get_base_dir() -> str:
    """Return nanochat's base directory: `NANOCHAT_BASE_DIR`, else ~/.cache/nanochat. It is not created."""
    return str(base_path(None))


def autodetect_device_type() -> str:
    """Return "cuda" if torch finds such a device, else "cpu". (Apple's mps is not supported.)"""
    return pick_device("auto").type


def compute_init(device_type: str = "cuda") -> tuple[bool, int, int, int, torch.device]:
    """Return (is distributed, rank, local rank, number of ranks, device) of a single process.

    Sets the global seed to 42, as upstream. Raises `ValueError` for a missing device.
    """
    device = pick_device(device_type)
    torch.manual_seed(42)
    return False, 0, 0, 1, device


def compute_cleanup() -> None:
    """Do nothing: there is no process group."""


def print0(s: str = "", end: str = "\n") -> None:
    """Print `s` (the only process is rank 0)."""
    print(s, end=end)


def base_path(directory: str | Path | None) -> Path:
    """Return the given base directory, or nanochat's."""
    return nanochat_home(environment()) if directory is None else Path(directory)
