"""`bench`: measure workloads on this engine, after one warm-up run each."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Headline figures of a workload's measured runs."""

    name: str
    meaning: str
    unit: str
    values: tuple[float, ...]


def run(names: Sequence[str], repeat: int, config: EngineConfig, common: Common) -> int:
    """Measure workloads and print a table; the last line of stdout is JSON."""
    if repeat < 1:
        raise BadRequest(f"--repeat must be >= 1, got {repeat}")
    makers = [find(name) for name in names]
    with open_session(config, common) as session, Interrupts() as interrupts:
        outcomes = []
        with bar("measuring", quiet=common.quiet) as progress:
            for i, make in enumerate(makers):
                progress(i, len(makers))
                outcomes.append(measure_one(session.engine, make, repeat, interrupts))
    print_table(_table(outcomes))
    print(json.dumps({"workloads": [_as_json(outcome) for outcome in outcomes]}))
    return 0


def find(name: str) -> Callable[[int], Workload]:
    """Return the workload of a name. Raises `BadRequest` listing all workloads."""
    known = {make.__name__: make for make in WORKLOADS}
    if name not in known:
        raise BadRequest(f"--workload must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def measure_one(
    engine: InferenceEngine, make: Callable[[int], Workload], repeat: int, interrupts: Interrupts
) -> Outcome:
    """Run a workload `repeat` times after one warm-up run; prompts differ, so that no prefix is cached."""
    runs = []
    for repetition in range(repeat + 1):
        if interrupts.pressed:
            raise KeyboardInterrupt
        runs.append(measure(engine, make(repetition)).headline(make.__name__))
    return Outcome(
        name=make.__name__,
        meaning=" ".join((inspect.getdoc(make) or "").split()),
        unit=runs[0][0],
        values=tuple(value for _, value in runs[1:]),
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("workload", "figure", "median", "min-max", "what it is", box=None)
    for outcome in outcomes:
        low, high = min(outcome.values), max(outcome.values)
        table.add_row(
            outcome.name, outcome.unit, f"{median(outcome.values):.1f}", f"{low:.1f}-{high:.1f}", outcome.meaning
        )
    return table


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "unit": outcome.unit,
        "median": median(outcome.values),
        "min": min(outcome.values),
        "max": max(outcome.values),
        "values": outcome.values,
    }
