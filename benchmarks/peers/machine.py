"""Describe the machine of a benchmark."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's name."""
    body = Path("/proc/cpuinfo")
    lines = body.read_text().splitlines() if body.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()
