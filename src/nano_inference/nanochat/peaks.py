"""Peak speed of GPUs: dense bfloat16 operations and memory bandwidth per second, from the vendors' data sheets.

Upstream's benchmark (scripts/infer_bench.py) divides what it measures by them. No torch.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

_log = logging.getLogger("nano_inference.nanochat")


class Peak(NamedTuple):
    """Peak speed of GPUs whose name has every word."""

    words: str
    flops: float
    bandwidth: float


PEAKS = (
    Peak("gb200", 2.5e15, 8e12),
    Peak("grace blackwell", 2.5e15, 8e12),
    Peak("b200", 2.25e15, 8e12),
    Peak("b100", 1.8e15, 8e12),
    Peak("h200 nvl", 836e12, 4.8e12),
    Peak("h200 pcie", 836e12, 4.8e12),
    Peak("h200", 989e12, 4.8e12),
    Peak("h100 nvl", 835e12, 3.9e12),
    Peak("h100 pcie", 756e12, 2e12),
    Peak("h100", 989e12, 3.35e12),
    Peak("h800 nvl", 989e12, 3.35e12),
    Peak("h800 pcie", 756e12, 2e12),
    Peak("h800", 756e12, 3.35e12),
    Peak("a100", 312e12, 2e12),
    Peak("a800", 312e12, 2e12),
    Peak("a40", 149.7e12, 696e9),
    Peak("a30", 165e12, 933e9),
    Peak("l40s", 362e12, 864e9),
    Peak("l40-s", 362e12, 864e9),
    Peak("l40 s", 362e12, 864e9),
    Peak("l4", 121e12, 300e9),
    Peak("mi355", 2.5e15, 8e12),
    Peak("mi325", 1.3074e15, 6e12),
    Peak("mi300x", 1.3074e15, 5.3e12),
    Peak("mi300a", 980.6e12, 5.3e12),
    Peak("mi250x", 383e12, 3.28e12),
    Peak("mi250", 362.1e12, 3.28e12),
    Peak("5090", 209.5e12, 1.79e12),
    Peak("4090", 165.2e12, 1.01e12),
    Peak("3090", 71e12, 936e9),
)
"""The first that matches a name counts, so more specific ones come first."""


def get_peak_flops(device_name: str) -> float:
    """Return a GPU's dense bfloat16 operations per second, infinity with a warning for an unknown one."""
    return _known(device_name, "flops")


def get_peak_bandwidth(device_name: str) -> float:
    """Return a GPU's bytes of memory per second, infinity with a warning for an unknown one."""
    return _known(device_name, "bandwidth")


def _known(device_name: str, field: str) -> float:
    name = device_name.lower()
    found = next((peak for peak in PEAKS if all(word in name for word in peak.words.split())), None)
    if found is None:
        _log.warning("the peak %s of %r is not known: shares of it are 0%%", field, device_name)
        return math.inf
    return float(getattr(found, field))
