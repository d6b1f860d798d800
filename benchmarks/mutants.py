"""Break rooms of the package on purpose, one small change at a time, and count how many changes the tests notice.

    python benchmarks/mutants.py [--count 160] [--seed 0] [--workers 2] [--tree DIR] [--seconds 60] [--reach FILE]
    python benchmarks/mutants.py --rooms server --tests tests/server --count 60

A mutant is one changed operator, constant, condition or removed call in one of the rooms (default: the core's, by
scripts/size.py); the same seed chooses the same mutants of the same sources. First the tests run once, to find out
which test calls which function (`--reach FILE` keeps that for the next time). Then each mutant runs the tests that call
its function, fastest first, until one fails or those of `--seconds` have passed. `--tree` is another checkout whose
sources and tests are used, to compare two revisions. A mutant is caught if a test fails, if the tests cannot be
collected, or if they take three times as long as they may; a function that no test calls is listed as missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutation.places import Mutant, all_mutants, mutated

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "mutation"
CORE_ROOMS: str = runpy.run_path(str(ROOT / "scripts" / "size.py"))["CORE_ROOMS"]
CORE_TESTS = "tests/core tests/engine tests/executors/test_sampling.py tests/sim tests/test_*.py tests/weights"
Reach = Sequence[tuple[str, float, dict[str, list[int]]]]
"""Tests with their seconds and the functions that they call, as `mutation.reach` writes them."""


class WarmPytest:
    """Owns a process that runs tests in forked children (`mutation/warm.py`)."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(HERE / "warm.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, tree: Path, package: Path, tests: Sequence[str], limit_s: float) -> dict[str, Any]:
        """Run tests of a checkout on a copy of the package; return the exit status and the end of the output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"tree": str(tree), "package": str(package), "tests": tests, "limit_s": limit_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def reach_of(tree: Path, patterns: str, kept: Path | None) -> Reach:
    """Run all tests once, noting which functions each calls; or read what an earlier call kept."""
    with tempfile.TemporaryDirectory() as home:
        out = kept or Path(home) / "reach.jsonl"
        if not out.exists():
            paths = os.pathsep.join((str(tree / "src"), str(tree), str(HERE)))
            command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "reach"]
            found = [str(path) for pattern in patterns.split() for path in sorted(tree.glob(pattern))]
            environment = os.environ | {"PYTHONPATH": paths, "REACH_OUT": str(out)}
            ended = subprocess.run([*command, *found], cwd=tree, env=environment, check=False)
            assert ended.returncode == 0, "the tests fail without any change"
        return [json.loads(line) for line in out.read_text().splitlines()]


def tests_for(mutant: Mutant, reach: Reach, seconds: float) -> list[str]:
    """Return the tests that call the mutant's function, fastest first, as many as take so many seconds."""
    found = [
        (duration, name)
        for name, duration, calls in reach
        if mutant.file in calls and (not mutant.function or mutant.function in calls[mutant.file])
    ]
    found.sort()
    sums = accumulate(duration for duration, _ in found)
    return [name for (_, name), total in zip(found, sums, strict=True) if total <= seconds] or [n for _, n in found[:1]]


def judge(
    mutant: Mutant | None, tree: Path, tests: Sequence[str], pytest: WarmPytest, seconds: float
) -> tuple[bool, str]:
    """Run tests on a copy of the sources, changed if there is a mutant; return whether one failed, and which."""
    if not tests:
        return False, "no test calls it"
    with tempfile.TemporaryDirectory() as home:
        package = Path(home) / "nano_inference"
        shutil.copytree(tree / "src" / "nano_inference", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            changed = package / mutant.file
            changed.write_text(mutated(changed.read_text(), mutant.place))
        ended = pytest.run(tree, Path(home), tests, 10 + 3 * seconds)
    failed = [line for line in ended["output"].splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ended["code"] == 1 and not failed:
        raise RuntimeError(f"pytest did not run: {ended['output']}")
    return ended["code"] != 0, failed[0][:120] if failed else f"exit status {ended['code']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", default=CORE_ROOMS, help="folders and modules of the package, with spaces")
    parser.add_argument("--tests", default=CORE_TESTS, help="files and folders of tests, with spaces")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--reach", type=Path)
    given = parser.parse_args()
    tree = given.tree.resolve()
    reach = reach_of(tree, given.tests, given.reach)
    known = all_mutants(tree / "src" / "nano_inference", frozenset(given.rooms.split()))
    chosen = random.Random(given.seed).sample(known, min(given.count, len(known)))
    idle: SimpleQueue[WarmPytest] = SimpleQueue()
    fastest = [name for _, name in sorted((seconds, name) for name, seconds, _ in reach)[:50]]
    for _ in range(given.workers):
        idle.put(pytest := WarmPytest())
        is_red, why = judge(None, tree, fastest, pytest, given.seconds)
        assert not is_red, f"a test fails without any change: {why}"

    def verdict_of(mutant: Mutant) -> tuple[bool, str]:
        pytest = idle.get()
        try:
            return judge(mutant, tree, tests_for(mutant, reach, given.seconds), pytest, given.seconds)
        finally:
            idle.put(pytest)

    missed: Counter[str] = Counter()
    with ThreadPoolExecutor(given.workers) as pool:
        for mutant, (is_caught, by) in zip(chosen, pool.map(verdict_of, chosen), strict=True):
            missed[mutant.file] += not is_caught
            word = "caught" if is_caught else "MISSED"
            print(f"{word} {mutant.file}:{mutant.line} {mutant.change} ({by})", flush=True)
    num_caught = len(chosen) - missed.total()
    print(f"{num_caught} of {len(chosen)} mutants caught, of {len(known)} possible; missed: {dict(+missed)}")


if __name__ == "__main__":
    main()
