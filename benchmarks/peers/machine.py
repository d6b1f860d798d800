"""What a benchmark says of the machine it ran on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's name."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()
