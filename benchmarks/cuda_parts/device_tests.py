"""The tests section: tests/gpu with pytest, or without it the comparisons of kernels, which need no other package.

Then the comparisons of kernels once more under NVIDIA's compute-sanitizer, where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from benchmarks.cuda_parts.metadata import is_installed, write_metadata
from benchmarks.cuda_parts.models import Bench
from benchmarks.cuda_parts.report import Sink

ROOT = Path(__file__).parents[2]
OPTIONS = ("--noconftest", "-p", "no:cacheprovider", "-W", "default", "--tb=line", "-rfE")
"""conftest.py needs hypothesis; a warning of another version of torch is no failure."""
PYTEST = (sys.executable, "-P", "-m", "pytest", *OPTIONS)
ALONE = ("-p", "no:xdist")
KERNELS = "tests/gpu/test_kernels.py"
MEMORY = "tests/gpu/test_memory.py"
"""Needs the GPU for itself."""
TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
"""Where compute-sanitizer may be beside the PATH."""
TOOLS = ("memcheck", "racecheck")
"""They find accesses outside of allocated memory, and unordered accesses of threads to shared memory."""
UNCACHED: Mapping[str, str] = MappingProxyType({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
"""Each tensor is an allocation of its own, behind whose end the sanitizer notices accesses."""
PASSED = re.compile(r"\b(\d+) passed")
MOST_NAMED = 20
SPARE_S = 3.0


def tests(bench: Bench, sink: Sink) -> None:
    """Run tests/gpu, and name what fails."""
    if importlib.util.find_spec("pytest") is None:
        sink.add("tests/gpu", "not run: pytest is not installed")
        compare(bench, sink)
        return
    words = ("FAILED", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        more = metadata_path(Path(folder))
        _run(sink, "tests/gpu", [*PYTEST, *parallel(), "tests/gpu", f"--ignore={MEMORY}"], words, more)
        _run(sink, MEMORY, [*PYTEST, *ALONE, MEMORY], words, more)


def metadata_path(folder: Path) -> dict[str, str]:
    """Return the variables with which Python finds the package's metadata, which is written if it is not installed."""
    if is_installed():
        return {}
    write_metadata(ROOT, folder)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def parallel() -> tuple[str, ...]:
    """Return pytest's options for a process on every second core, if it has xdist: most of the time is compiling."""
    count = (os.cpu_count() or 1) // 2
    return ("-n", str(count)) if count > 1 and importlib.util.find_spec("xdist") is not None else ALONE


def sanitize(bench: Bench, sink: Sink, toolkits: Sequence[str] = TOOLKITS) -> None:
    """Run the comparisons of kernels under compute-sanitizer, once with each of its `TOOLS`.

    They are divided among a process on every second core, because the sanitizer makes them many times slower. The
    program is looked for on the PATH, then in the directories `toolkits`.
    """
    program = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *toolkits)))
    missing = "compute-sanitizer" if program is None else "pytest" if importlib.util.find_spec("pytest") is None else ""
    if bench.is_dry or missing or program is None:
        sink.add("compute-sanitizer", f"not run: {'it needs a GPU' if bench.is_dry else missing + ' is not installed'}")
        return
    names = _names_of_tests(KERNELS)
    count = min(len(names), max(1, (os.cpu_count() or 1) // 2))
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "9", *PYTEST, *ALONE]
        _sanitize(sink, f"compute-sanitizer, {tool}", [[*command, *names[index::count]] for index in range(count)])


def _sanitize(sink: Sink, name: str, commands: Sequence[Sequence[str]]) -> None:
    """Run commands at once; report those that end alike as one figure, and what the failed ones found."""
    with ThreadPoolExecutor(len(commands)) as pool:
        ends = list(pool.map(lambda command: _ran(command, sink.deadline, UNCACHED), commands))
    for summary, group in groupby(sorted(ends, key=lambda one: one.summary), key=lambda one: one.summary):
        alike = list(group)
        passed = sum(int(found[1]) for end in alike if (found := PASSED.search("\n".join(end.lines))))
        sink.add(name, f"{len(alike)} of {len(commands)} processes, {passed} tests passed: {summary}")
        _name_failures(sink, name, alike, ("FAILED", "ERROR", "========= "))


def _names_of_tests(file: str) -> list[str]:
    """Return the names with which pytest runs each test of a file; the file's if they cannot be listed."""
    command = [*PYTEST, *ALONE, "--collect-only", "-o", "addopts=", "-q", file]  # a second -q would print their number
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{file}::")] or [file]


@dataclass(frozen=True, slots=True)
class End:
    """How a run of tests ended."""

    summary: str
    failed: bool
    lines: Sequence[str]
    """What it printed."""


def _run(
    sink: Sink, name: str, command: Sequence[str], starts: tuple[str, ...], more: Mapping[str, str] | None = None
) -> None:
    """Run tests in the time that is left; report the last line, and after a failure lines with these starts.

    `more` are further variables of the environment.
    """
    end = _ran(command, sink.deadline, more or {})
    sink.add(name, end.summary)
    _name_failures(sink, name, [end], starts)


def _ran(command: Sequence[str], deadline: float, more: Mapping[str, str]) -> End:
    """Run a command until a deadline, with further variables of the environment."""
    seconds = max(1.0, deadline - time.monotonic() - SPARE_S)
    environment = {**os.environ, **more}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        lines = _text(error.stdout).strip().splitlines() or ["no output"]
        return End(f"stopped after {seconds:.0f} s: {lines[-1]}", False, lines)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    has_failed = done.returncode not in (0, 5)
    return End(f"failed: {lines[-1]}" if has_failed else lines[-1], has_failed, lines)


def _name_failures(sink: Sink, name: str, ends: Sequence[End], starts: tuple[str, ...]) -> None:
    """Report the lines of failed runs that begin with one of `starts`, up to `MOST_NAMED`."""
    for line in [line for end in ends if end.failed for line in end.lines if line.startswith(starts)][:MOST_NAMED]:
        sink.add(name, line)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def compare(bench: Bench, sink: Sink) -> None:
    """Compare kernels with their references; `tests/gpu/test_kernels.py` does the same with pytest."""
    from tests.cuda.all_cases import all_cases
    from tests.cuda.case import DEVICE_SLACK

    cases = list(all_cases())
    if bench.is_dry:
        cases = cases[:3]
    else:
        from tests.cuda import triton_cases

        cases += triton_cases.cases()
    num_right = 0
    for case in cases:
        try:
            error = case.run(bench.kernels, bench.device)
        except Exception as found:  # the other comparisons are still of use
            sink.fail(f"comparison {case.name}", found)
            continue
        if error <= DEVICE_SLACK * case.bound:
            num_right += 1
        else:
            sink.add(f"comparison {case.name}", f"failed: error {error:.3g}, bound {DEVICE_SLACK * case.bound:.3g}")
    sink.add("comparisons of kernels", f"{num_right} of {len(cases)} are right")
