"""The report of benchmarks/cuda.py, and the processes that measure: one per unit, so that none can end the others."""

from __future__ import annotations

import gc
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cuda_parts.models import Bench
from nano_inference.executors.cuda.launchers import triton_kernels
from tests.cuda.plain import plain_kernels

Figure = dict[str, Any]
CEILINGS = {"GB/s": ("bytes", 1e9), "TFLOP/s": ("flops", 1e12)}
"""What the ceiling of a unit limits, and its value in units a second."""
UNIT_SECONDS = 180.0
"""Most seconds of a unit: a hang of one leaves time for the others."""
FORK = multiprocessing.get_context("fork")
"""The modules are imported once, and no Python starts that would need PYTHONSAFEPATH. The first process may not use
CUDA: its children could not."""


class Unit(NamedTuple):
    """What one process measures."""

    section: str
    name: str
    """A model, or empty if the section is one unit."""
    run: Callable[[Bench, Sink], None]


@dataclass(frozen=True, slots=True)
class Sink:
    """Sends figures to the process that prints them."""

    section: str
    connection: Connection
    ceilings: dict[str, float]
    """Bytes and floating-point operations a second, as far as they are known, and the figures before by name."""

    @property
    def card(self) -> str:
        """Return the card's name, one of those with bars: an H200 unless it is an H100."""
        is_cuda = torch.cuda.is_initialized()
        return "H100" if is_cuda and "H100" in torch.cuda.get_device_name() else "H200"

    def add(self, name: str, value: float | str, unit: str = "", **more: float | str) -> None:
        """Send a figure."""
        self.connection.send({"section": self.section, "name": name, "value": value, "unit": unit, **more})

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Measure one thing; if that fails, the figure is the error's first line."""
        try:
            work()
        except Exception as error:  # the other figures are still of use
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Send an error instead of a figure, with its traceback for the file."""
        line = next(iter(str(error).splitlines()), "")
        trace = "".join(traceback.format_exception(error))
        self.add(name, f"failed: {type(error).__name__}: {line}", trace=trace)


@dataclass
class Report:
    """Prints each figure when it is known, and keeps the JSON file complete."""

    is_dry: bool
    out: Path | None
    known: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def add(self, figure: Figure) -> None:
        """Print a figure with the seconds since the start, and write the file."""
        figure = {**figure, "at": round(time.monotonic() - self.started)}
        self.figures.append(figure)
        if isinstance(figure["value"], float):
            self.ceilings[figure["name"]] = figure["value"]
        if figure["unit"] in CEILINGS and figure["section"] == "ceilings":
            kind, scale = CEILINGS[figure["unit"]]
            self.ceilings[kind] = figure["value"] * scale
        if self.out is not None:
            self.out.write_text(self.text() + "\n")
        print(f"{'dry ' * self.is_dry}{line_of(figure)}", flush=True)

    def text(self) -> str:
        """Return the report as JSON."""
        return json.dumps({**self.known, "is_dry": self.is_dry, "figures": self.figures}, indent=1)

    @property
    def has_failed(self) -> bool:
        """Return whether something could not be measured for another reason than lack of time."""
        return any(str(one["value"]).startswith("failed") for one in self.figures)


def line_of(figure: Figure) -> str:
    """Return a figure as a line of the table."""
    value, unit = figure["value"], figure["unit"]
    shown = number(value) if isinstance(value, float) else value
    hidden = ("section", "name", "value", "unit", "at", "trace")
    more = [
        f"{key} {number(one) if isinstance(one, float) else one}" for key, one in figure.items() if key not in hidden
    ]
    at = [f"{figure['at']} s"] if "at" in figure else []
    return " · ".join([f"{figure['section']:9} {figure['name']:46} {shown:>9} {unit}".rstrip(), *more, *at])


def number(value: float) -> str:
    """Return a number with three or more digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def open_bench(*, is_dry: bool) -> Bench:
    """Return where a process measures. Uses CUDA unless it is a dry run."""
    if is_dry:
        torch.set_num_threads(1)
        return Bench(device=torch.device("cpu"), kernels=plain_kernels(), dtype=torch.float32, is_dry=True)
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; --dry runs on a CPU")
    return Bench(device=torch.device("cuda"), kernels=triton_kernels(), dtype=torch.bfloat16, is_dry=False)


def _child(unit: Unit, sink: Sink, *, is_dry: bool) -> None:
    gc.freeze()  # a full collection would write to, and so copy, all memory that this process shares with the first
    try:
        unit.run(open_bench(is_dry=is_dry), sink)
    except Exception as error:  # one line instead of a traceback
        sink.fail(unit.name or unit.section, error)


def run_unit(unit: Unit, report: Report, deadline: float) -> None:
    """Measure a unit in a new process, which is killed at the deadline, or after `UNIT_SECONDS` if that is sooner."""
    left = min(deadline - time.monotonic(), UNIT_SECONDS)
    if left <= 0:
        report.add(note(unit, "skipped: no time is left"))
        return
    ends = time.monotonic() + left
    reader, writer = FORK.Pipe(duplex=False)
    sink = Sink(unit.section, writer, report.ceilings)
    process = FORK.Process(target=_child, args=(unit, sink), kwargs={"is_dry": report.is_dry})
    process.start()
    writer.close()
    try:
        while reader.poll(max(0.0, ends - time.monotonic())):
            report.add(reader.recv())
        process.kill()
        report.add(note(unit, f"stopped after {left:.0f} s"))
    except EOFError:  # the process has ended
        process.join()
        if process.exitcode:
            report.add(note(unit, f"failed: the process ended with {process.exitcode}"))
    finally:
        reader.close()
        process.join()


def note(unit: Unit, text: str) -> Figure:
    """Return a figure without a number."""
    return {"section": unit.section, "name": unit.name or unit.section, "value": text, "unit": ""}
