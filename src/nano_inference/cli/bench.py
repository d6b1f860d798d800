"""`bench`: measure workloads on this engine, after one warm-up run each."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from nano_inference.cli.models import print_table
from nano_inference.cli.options import Common
from nano_inference.cli.session import open_session
from nano_inference.cli.terminal import Interrupts, bar
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.types import BadRequest
from nano_inference.workloads import WORKLOADS, Workload, measure


def run(names: Sequence[str], repeat: int, config: EngineConfig, common: Common) -> int:
    """Measure workloads and print a table; the last line of stdout is JSON."""
    if repeat < 1:
        raise BadRequest(f"--repeat must be >= 1, got {repeat}")
    makers = [find(name) for name in names]
    with open_session(config, common) as session, Interrupts() as interrupts:
        rows = []
        with bar("measuring", quiet=common.quiet) as progress:
            for i, make in enumerate(makers):
                progress(i, len(makers))
                rows.append(measure_one(session.engine, make, repeat, interrupts))
    table = Table("workload", "figure", "median", "min-max", "what it is", box=None)
    for make, row in zip(makers, rows, strict=True):
        meaning = " ".join((inspect.getdoc(make) or "").split())
        table.add_row(row["name"], row["unit"], f"{row['median']:.1f}", f"{row['min']:.1f}-{row['max']:.1f}", meaning)
    print_table(table)
    print(json.dumps({"workloads": rows}))
    return 0


def find(name: str) -> Callable[[int], Workload]:
    """Return the workload of a name. Raises `BadRequest` listing all workloads."""
    known = {make.__name__: make for make in WORKLOADS}
    if name not in known:
        raise BadRequest(f"--workload must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def measure_one(
    engine: InferenceEngine, make: Callable[[int], Workload], repeat: int, interrupts: Interrupts
) -> dict[str, Any]:
    """Return the headline figures of `repeat` runs after a warm-up; prompts differ, so that no prefix is cached."""
    runs = []
    for repetition in range(repeat + 1):
        if interrupts.pressed:
            raise KeyboardInterrupt
        runs.append(measure(engine, make(repetition)).headline(make.__name__))
    values = [value for _, value in runs[1:]]
    return {
        "name": make.__name__,
        "unit": runs[0][0],
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "values": values,
    }
