"""Break rooms of the package on purpose, one small change at a time, and count how many changes the tests notice.

    python benchmarks/mutants.py [--count 160] [--seed 0] [--workers 2] [--seconds 60] [--reach FILE]
    python benchmarks/mutants.py --rooms server --tests tests/server --count 60

A mutant is one changed operator, constant, condition or removed call in one of the rooms (default: the core's, by
scripts/size.py); the same seed chooses the same mutants of the same sources. First the tests run once, to find out
which test calls which function (`--reach FILE` keeps that for the next time). Then each mutant runs the tests that call
its function, fastest first, until one fails or those of `--seconds` have passed. A mutant is caught if a test fails, if
the tests cannot be collected, or if they take three times as long as they may; a function that no test calls is listed
as missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

from mutation.places import Mutant, all_mutants, mutated

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nano_inference"
CORE_ROOMS: str = runpy.run_path(str(ROOT / "scripts" / "size.py"))["CORE_ROOMS"]
CORE_TESTS = "tests/core tests/engine tests/executors/test_sampling.py tests/sim tests/test_*.py tests/weights"
PYTEST = (sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider")
Reach = Sequence[tuple[str, float, dict[str, list[int]]]]
"""Tests with their seconds and the functions that they call, as `mutation.reach` writes them."""


def environment(*places: Path, **more: str) -> dict[str, str]:
    """Return the variables of a run of tests: where packages are looked for, and that nothing is written there."""
    path = os.pathsep.join(map(str, (*places, ROOT)))
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | more


def reach_of(patterns: str, kept: Path | None) -> Reach:
    """Run all tests once, noting which functions each calls; or read what an earlier call kept."""
    with tempfile.TemporaryDirectory() as home:
        out = kept or Path(home) / "reach.jsonl"
        if not out.exists():
            found = [str(path) for pattern in patterns.split() for path in sorted(ROOT.glob(pattern))]
            options = ["-n", "2", "--dist", "loadfile", "-p", "reach"]
            places = (PACKAGE.parent, Path(__file__).parent / "mutation")
            ended = subprocess.run(
                [*PYTEST, *options, *found], cwd=ROOT, env=environment(*places, REACH_OUT=str(out)), check=False
            )
            assert ended.returncode == 0, "the tests fail without any change"
        return [json.loads(line) for line in out.read_text().splitlines()]


def tests_for(mutant: Mutant, reach: Reach, seconds: float) -> list[str]:
    """Return the tests that call the mutant's function, fastest first, as many as take so many seconds."""
    found = sorted(
        (duration, name)
        for name, duration, calls in reach
        if mutant.file in calls and (not mutant.function or mutant.function in calls[mutant.file])
    )
    sums = accumulate(duration for duration, _ in found)
    return [name for (_, name), total in zip(found, sums, strict=True) if total <= seconds] or [n for _, n in found[:1]]


def judge(mutant: Mutant | None, tests: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Run tests on a copy of the sources, changed if there is a mutant; return whether one failed, and which."""
    if not tests:
        return False, "no test calls it"
    with tempfile.TemporaryDirectory() as home:
        package = Path(home) / "nano_inference"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            changed = package / mutant.file
            changed.write_text(mutated(changed.read_text(), mutant.place))
        command = [*PYTEST, "-x", "--no-header", "--tb=line", "--assert=plain", *tests]
        out = Path(home) / "output"
        with out.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(Path(home)), stdout=file, stderr=file, start_new_session=True
            )
        try:
            code = process.wait(30 + 3 * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
            return True, f"takes over {30 + 3 * seconds:.0f} s"
        output = out.read_text(errors="replace")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code == 1 and not failed:
        raise RuntimeError(f"pytest did not run: {output[-4000:]}")
    return code != 0, failed[0][:120] if failed else f"exit status {code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", default=CORE_ROOMS, help="folders and modules of the package, with spaces")
    parser.add_argument("--tests", default=CORE_TESTS, help="files and folders of tests, with spaces")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--reach", type=Path)
    given = parser.parse_args()
    reach = reach_of(given.tests, given.reach)
    known = all_mutants(PACKAGE, frozenset(given.rooms.split()))
    chosen = random.Random(given.seed).sample(known, min(given.count, len(known)))
    fastest = [name for _, name in sorted((seconds, name) for name, seconds, _ in reach)[:50]]
    is_red, why = judge(None, fastest, given.seconds)
    assert not is_red, f"a test fails without any change: {why}"

    def verdict_of(mutant: Mutant) -> tuple[bool, str]:
        return judge(mutant, tests_for(mutant, reach, given.seconds), given.seconds)

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
