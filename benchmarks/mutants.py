"""Break the core rooms on purpose, one small change at a time, and count how many of the changes the tests notice.

    python benchmarks/mutants.py [--count 160] [--seed 0] [--workers 2] [--tree DIR] [--only FILE] [--out FILE]

A mutant is one changed operator, constant, condition or removed call in one of `ROOMS`; the same seed chooses the same
mutants of the same sources. Each runs `TESTS`, those named after its room first, until one fails. `--tree` is another
checkout whose sources and tests are used, to compare two revisions. A mutant is caught if a test fails, if the tests
cannot be collected, or if they take longer than `LIMIT_S`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (
    "types admission door sequence scheduling kv sampling ngram_drafter speculate speculation "
    "drafting core engine control books calls ledger recovery delta_stream updates runner checks "
    "async_engine engine_thread errors"
)
"""Rooms of the core, under their names in either revision."""
TESTS = (
    "test_scheduling test_kv test_sampling test_ngram_drafter test_speculate test_types test_drawing "
    "sim test_control test_speculation test_engine test_resume test_rl test_misuse test_batch "
    "test_async_engine test_interruptions test_lineage test_logprobs test_embeddings test_kv_pages"
)
LIMIT_S = 600
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult},
}


@dataclass(frozen=True)
class Mutant:
    """One change: the number of its place in the file's `places`."""

    file: str
    place: int
    line: int
    change: str


@dataclass(frozen=True)
class Verdict:
    """What the tests made of a mutant."""

    mutant: Mutant
    is_caught: bool
    by: str


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    """Yield every place that can be changed: its node, the change in words, and a function that changes it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for at, operator in enumerate(node.ops):
                yield from _swap(node, operator, lambda new, node=node, at=at: node.ops.__setitem__(at, new))
        elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign):
            yield from _swap(node, node.op, lambda new, node=node: setattr(node, "op", new))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, f"{node.value} -> {node.value + 1}", lambda node=node: setattr(node, "value", node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, f"{node.value} -> {not node.value}", lambda node=node: setattr(node, "value", not node.value)
        elif isinstance(node, ast.If):
            yield node, "condition negated", lambda node=node: setattr(node, "test", _negated(node.test))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "call removed", lambda node=node: setattr(node, "value", ast.Constant(None))


def _swap(
    node: ast.AST, operator: ast.AST, put: Callable[[ast.AST], None]
) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    new = SWAPS.get(type(operator))
    if new is not None:
        yield node, f"{type(operator).__name__} -> {new.__name__}", lambda: put(new())


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def skipped_nodes(tree: ast.Module) -> set[int]:
    """Return the ids of nodes that no test could notice: annotations, assertions and calls of a logger."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Assert):
            parts.append(node)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(node.returns)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "_log" in ast.unparse(node.value.func):
            parts.append(node)
        found |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return found


def all_mutants(package: Path) -> list[Mutant]:
    """Return every mutant of the rooms."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.partition("/")[0].removesuffix(".py") not in ROOMS.split():
            continue
        tree = ast.parse(path.read_text())
        skipped = skipped_nodes(tree)
        for number, (node, change, _) in enumerate(places(tree)):
            if id(node) not in skipped:
                found.append(Mutant(name, number, getattr(node, "lineno", 0), change))
    return found


def mutated(source: str, place: int) -> str:
    """Return a source with the change at that place."""
    tree = copy.deepcopy(ast.parse(source))
    for number, (_, _, apply) in enumerate(places(tree)):
        if number == place:
            apply()
            break
    return ast.unparse(ast.fix_missing_locations(tree))


def tests_for(mutant: Mutant, tree: Path) -> list[str]:
    """Return the tests to run, those of the mutant's room first."""
    room = Path(mutant.file).parts[0].removesuffix(".py")
    names = [f"tests/{name}" if (tree / "tests" / name).is_dir() else f"tests/{name}.py" for name in TESTS.split()]
    there = [name for name in names if (tree / name).exists()]
    return sorted(there, key=lambda name: room not in name)


def run(mutant: Mutant, tree: Path) -> Verdict:
    """Run the tests on a copy of the sources that has the change."""
    with tempfile.TemporaryDirectory() as home:
        package = Path(home) / "nano_inference"
        shutil.copytree(tree / "src" / "nano_inference", package, ignore=shutil.ignore_patterns("__pycache__"))
        changed = package / mutant.file
        changed.write_text(mutated(changed.read_text(), mutant.place))
        environment = os.environ | {"PYTHONPATH": f"{home}{os.pathsep}{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-P", "-m", "pytest", "-xq", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
        try:
            ended = subprocess.run(
                [*command, *tests_for(mutant, tree)],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Verdict(mutant, True, "the time limit")
        failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return Verdict(mutant, ended.returncode != 0, failed[0][:120] if failed else f"exit code {ended.returncode}")


def main() -> None:
    """Choose the mutants, run them, print each and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tree = given.tree.resolve()
    known = [one for one in all_mutants(tree / "src" / "nano_inference") if given.only in one.file]
    chosen = random.Random(given.seed).sample(known, min(given.count, len(known)))
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(given.workers) as pool:
        for verdict in pool.map(lambda mutant: run(mutant, tree), chosen):
            verdicts.append(verdict)
            mutant = verdict.mutant
            print(
                f"{'caught' if verdict.is_caught else 'MISSED'} {mutant.file}:{mutant.line} {mutant.change}", flush=True
            )
    if given.out:
        given.out.write_text(json.dumps([asdict(one) for one in verdicts], indent=1))
    rooms = Counter(one.mutant.file for one in verdicts if not one.is_caught)
    num_caught = sum(one.is_caught for one in verdicts)
    print(f"{num_caught} of {len(verdicts)} mutants caught, of {len(known)} possible; missed: {dict(rooms)}")


if __name__ == "__main__":
    main()
