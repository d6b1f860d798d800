"""Compare this tree with another commit, token by token, on this machine and in this run.

    python benchmarks/ab.py [--against REV] [--only llama,nanochat-G4] [--kernels avx2]

REV (default: HEAD~1 in a clean tree, else HEAD) is checked out into a temporary worktree. The same recording program
runs in both trees, each in its own process, on the same random checkpoints: every family, every generation of
nanochat, every kind of quantised block, and the default model where the cache has it. Requests are ragged, share
prefixes, use every sampling parameter; engines prefill in chunks, preempt, speculate.

C path, and the CUDA executor with plain kernels: tokens and all numbers have the same bits. Torch path: the same bits
in the scenario "all rows", within 1e-5 (of the list's largest number, at least 1) in "mixed", which is run in float32
only: one rounding in half precision is more. In "all rows" every request scores its prompt and then samples, and
nothing is preempted or read from the cache. So every row of a step is needed, and `Keep`, which drops rows of the last
layer that are not needed, drops none.

The exit status is 1 if anything differs, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from recording import checkpoints  # noqa: E402
from recording.cases import BITWISE, Case, cases_of  # noqa: E402
from recording.streams import Recording, first_difference  # noqa: E402

from nano_inference.config import KernelsName  # noqa: E402

DIFFERENT, IMPOSSIBLE = 1, 2


class CannotCompare(Exception):
    """There is no other tree, or the recording program failed; the message says why."""


Outcome = tuple[Case, Recording, str | None]
"""One case: what this tree gave, and how the other differs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, return the exit status."""
    options = parse(arguments)
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="nano-inference-ab-") as folder:
            outcomes = run(options, Path(folder))
    except (CannotCompare, ValueError) as error:
        print(error, file=sys.stderr)
        return IMPOSSIBLE
    report(outcomes)
    num_different = sum(difference is not None for _, _, difference in outcomes)
    print(f"\n{len(outcomes)} cases, {num_different} different, {time.perf_counter() - start:.0f} s")
    return DIFFERENT if num_different else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", default="", help="commit to compare with")
    parser.add_argument("--only", default="", help="names of models, or how they begin, separated by commas")
    parser.add_argument("--kernels", default="auto", choices=[name for name in get_args(KernelsName) if name != "off"])
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Write the checkpoints, record, compare."""
    chosen = checkpoints.names([one for one in options.only.split(",") if one])
    against = options.against
    if not against:  # a changed tree is compared with the commit that it comes from
        against = "HEAD" if git(ROOT, "status", "--porcelain").strip() else "HEAD~1"
    files = {name: checkpoints.write(name, folder) for name in chosen}
    cases = [case for name in chosen for case in cases_of(name)]
    with worktree(ROOT, against, folder / "worktree") as other:
        print(f"this tree against {against}", flush=True)
        here, there = record([ROOT, other], cases, files, options.kernels, folder)
    triples = zip(cases, here, there, strict=True)
    return [(case, mine, first_difference(mine, other, case.tolerance)) for case, mine, other in triples]


# ---- two trees ------------------------------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    """Return git's output. Raises `CannotCompare` with its last line where it fails or is absent."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotCompare(f"git could not be run: {error}") from error
    if done.returncode:
        raise CannotCompare(f"git {' '.join(arguments)}: {(done.stderr.splitlines() or ['failed'])[-1]}")
    return done.stdout


@contextmanager
def worktree(root: Path, revision: str, path: Path) -> Iterator[Path]:
    """Yield a worktree of a commit, which is removed afterwards. Raises `CannotCompare` outside a repository's root."""
    top = Path(git(root, "rev-parse", "--show-toplevel").strip())
    if top.resolve() != root:
        raise CannotCompare(f"{root} is not the root of a git repository ({top} is)")
    git(root, "worktree", "add", "--detach", str(path), revision)
    try:
        yield path
    finally:
        git(root, "worktree", "remove", "--force", str(path))


def record(
    trees: Sequence[Path], cases: Sequence[Case], files: Mapping[str, Path], kernels: str, folder: Path
) -> list[list[Recording]]:
    """Run the recording program in all trees at once; return the recordings of each."""
    plan = folder / "plan.json"
    entries = [{"case": asdict(case), "files": str(files[case.model]), "kernels": kernels} for case in cases]
    plan.write_text(json.dumps(entries))
    children, outs = [], [folder / f"tree-{i}" for i in range(len(trees))]
    for tree, out in zip(trees, outs, strict=True):
        # The recording program is this tree's, the package that of `tree`.
        path = os.pathsep.join((str(tree / "src"), str(tree), str(ROOT / "benchmarks")))
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "recording.record", str(tree), str(plan), str(out)]
        with out.with_suffix(".log").open("wb") as log:
            children.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log))
    try:
        codes = [child.wait() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for tree, out, code in zip(trees, outs, codes, strict=True):
        if code:
            tail = "\n".join(out.with_suffix(".log").read_text(errors="replace").splitlines()[-12:])
            raise CannotCompare(f"the recording in {tree} ended with status {code}; the end of its log:\n{tail}")
    return [[Recording.from_dict(json.loads(line)) for line in out.read_text().splitlines()] for out in outs]


# ---- the table ------------------------------------------------------------------------------------------------------


def report(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each model, precision, path and bound, and below it what differs."""
    print(f"{'model':28} {'dtype':9} {'path':13} {'streams':>7} {'tokens':>7}  result")
    for case, group in groupby(outcomes, key=lambda one: replace(one[0], scenario="")):
        found = list(group)
        recordings = [one for _, one, _ in found]
        streams, tokens = sum(len(one.streams) for one in recordings), sum(one.num_tokens for one in recordings)
        path = next((one.code for one in recordings if one.code), "-")
        refused = [one.error for one in recordings if one.error]
        different = sum(difference is not None for _, _, difference in found)
        result = "same bits" if case.tolerance == BITWISE else f"within {case.tolerance:g}"
        result = f"refused: {refused[0]}" if refused else result
        result = f"{different} of {len(found)} DIFFERENT" if different else result
        print(f"{case.model:28} {case.dtype:9} {path:13} {streams:7} {tokens:7}  {result}")
        for one, recording, difference in found:
            if difference is not None:
                print(f"    {one.scenario}: {difference}")
            if one.scenario == "preempted" and not recording.error and not recording.num_preemptions:
                print("    preempted: NOTHING WAS PREEMPTED, the cache is too large")


if __name__ == "__main__":
    sys.exit(main())
