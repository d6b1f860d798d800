"""The tests section: tests/gpu with pytest, or without it the comparisons of kernels, which need no other package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cuda_parts.models import Bench
from benchmarks.cuda_parts.report import Sink

ROOT = Path(__file__).parents[2]
OPTIONS = ("--noconftest", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "default", "--tb=line", "-rfE")
"""conftest.py needs hypothesis; a warning of another version of torch is no failure."""
MOST_NAMED = 20
SPARE_S = 3.0


def tests(bench: Bench, sink: Sink) -> None:
    """Run tests/gpu, and name what fails."""
    if importlib.util.find_spec("pytest") is None:
        sink.add("tests/gpu", "not run: pytest is not installed")
        compare(bench, sink)
        return
    command = [sys.executable, "-P", "-m", "pytest", *OPTIONS, "tests/gpu"]
    seconds = max(1.0, sink.deadline - time.monotonic() - SPARE_S)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        lines = _text(error.stdout).strip().splitlines()
        sink.add("tests/gpu", f"stopped after {seconds:.0f} s: {lines[-1] if lines else 'no output'}")
        return
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    sink.add("tests/gpu", lines[-1] if done.returncode in (0, 5) else f"failed: {lines[-1]}")
    for line in [one for one in lines if one.startswith(("FAILED", "ERROR"))][:MOST_NAMED]:
        sink.add("tests/gpu", line)


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
