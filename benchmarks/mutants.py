"""Break the core rooms on purpose, one small change at a time, and count how many of the changes the tests notice.

    python benchmarks/mutants.py [--count 160] [--seed 0] [--workers 2] [--tree DIR] [--only FILE] [--seconds 60]
        [--reach FILE] [--out FILE]

A mutant is one changed operator, constant, condition or removed call in one of `ROOMS`; the same seed chooses the same
mutants of the same sources. First `TESTS` run once, to find out which test calls which function (`--reach FILE` keeps
that for the next time). Then each mutant runs the tests that call its function, fastest first, until one fails or those
of `--seconds` have passed. `--tree` is another checkout whose sources and tests are used, to compare two revisions. A
mutant is caught if a test fails, if the tests cannot be collected, or if they take three times as long as they may; a
function that no test calls is listed as missed.
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
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutation.places import Mutant, all_mutants, mutated

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "mutation"
ROOMS = (
    f"{runpy.run_path(str(ROOT / 'scripts' / 'size.py'))['CORE_ROOMS']} "
    "executors/sampling executors/truncation executors/vocabulary compat "
    "samples checks admission requests sequence appending scheduling kv seeds matching drafts speculation runner "
    "recovery state mailboxes driving exclusive calls step_control control ngram_drafter first_names "
    "sampling truncation vocabulary door speculate drafting books ledger delta_stream updates errors"
)
"""Rooms of the core, and what was part of it: where it is now, and under its names in earlier revisions."""
TESTS = (
    "test_scheduling test_kv test_sampling test_ngram_drafter test_speculate test_types test_drawing sim test_control "
    "test_speculation test_lookahead test_engine test_resume test_misuse test_bad_input test_batch test_async_engine "
    "test_interruptions test_lineage test_logprobs test_embeddings test_kv_pages test_training_sample test_rollout "
    "test_compat text/test_tools weights/test_held_update server/test_engine_link"
)
Reach = Sequence[tuple[str, float, dict[str, list[int]]]]
"""Tests with their seconds and the functions that they call, as `mutation.reach` writes them."""


@dataclass(frozen=True)
class Verdict:
    """What the tests made of a mutant."""

    mutant: Mutant
    is_caught: bool
    by: str


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


def reach_of(tree: Path, kept: Path | None) -> Reach:
    """Run all tests once, noting which functions each calls; or read what an earlier call kept."""
    if kept is None or not kept.exists():
        with tempfile.TemporaryDirectory() as home:
            out = kept or Path(home) / "reach.jsonl"
            names = [
                f"tests/{name}" if (tree / "tests" / name).is_dir() else f"tests/{name}.py" for name in TESTS.split()
            ]
            paths = (str(tree / "src"), str(tree), str(HERE))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "REACH_OUT": str(out)}
            command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "reach"]
            found = [name for name in names if (tree / name).exists()]
            ended = subprocess.run([*command, *found], cwd=tree, env=environment, check=False)
            assert ended.returncode == 0, "the tests fail without any change"
            return [json.loads(line) for line in out.read_text().splitlines()]
    return [json.loads(line) for line in kept.read_text().splitlines()]


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
    """Choose the mutants, run them, print each and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--reach", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tree = given.tree.resolve()
    reach = reach_of(tree, given.reach)
    known = [
        one for one in all_mutants(tree / "src" / "nano_inference", frozenset(ROOMS.split())) if given.only in one.file
    ]
    chosen = random.Random(given.seed).sample(known, min(given.count, len(known)))
    idle: SimpleQueue[WarmPytest] = SimpleQueue()
    fastest = [name for _, name in sorted((seconds, name) for name, seconds, _ in reach)[:50]]
    for _ in range(given.workers):
        idle.put(pytest := WarmPytest())
        is_red, why = judge(None, tree, fastest, pytest, given.seconds)
        assert not is_red, f"a test fails without any change: {why}"

    def verdict_of(mutant: Mutant) -> Verdict:
        pytest = idle.get()
        try:
            return Verdict(mutant, *judge(mutant, tree, tests_for(mutant, reach, given.seconds), pytest, given.seconds))
        finally:
            idle.put(pytest)

    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(given.workers) as pool:
        for verdict in pool.map(verdict_of, chosen):
            verdicts.append(verdict)
            mutant = verdict.mutant
            word = "caught" if verdict.is_caught else "MISSED"
            print(f"{word} {mutant.file}:{mutant.line} {mutant.change} ({verdict.by})", flush=True)
    if given.out:
        given.out.write_text(json.dumps([asdict(one) for one in verdicts], indent=1))
    rooms = Counter(one.mutant.file for one in verdicts if not one.is_caught)
    num_caught = sum(one.is_caught for one in verdicts)
    print(f"{num_caught} of {len(verdicts)} mutants caught, of {len(known)} possible; missed: {dict(rooms)}")


if __name__ == "__main__":
    main()
