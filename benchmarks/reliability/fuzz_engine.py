"""Differential fuzz of the engine: random histories, every number checked against Transformers in float32.

    python benchmarks/reliability/fuzz_engine.py [--minutes 30] [--seed N] [--family NAME …] [--path c|torch|cuda|all]

A world is a tiny random model of a random family, a random configuration (cache small enough to preempt) and a random
history over the public API: requests with every sampling parameter, matchers, token programs, streams, aborts,
resumed samples, pause, sleep, flush, updates of every kind. Checked: each token's log-probability (raw, tempered,
processed, alternatives, prompt) within 1e-4 of Transformers under the weight version that the token claims; K/V of
several versions (`on_running="keep"`) is computed piece by piece; the token is the best one or the one at its uniform;
masks, forced tokens, finish reasons, versions, block books; samples of one version equal a run alone on a fresh engine
(bit for bit on the C path). Seven of ten worlds of the CUDA executor have no request that waits for the host, so that
windows overlap. The last line is one JSON object; exit status 1 on any difference. A difference is printed with the
command that repeats its world.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from differential.history import release, run_world
from differential.judge import Differences, Judge, Verdict
from differential.models import MODELS
from differential.worlds import ComputePath, World, make_world

from nano_inference.core.step import Runner

PATHS: tuple[ComputePath, ...] = ("c", "torch", "cuda")
MAX_FAILURES = 20
"""Worlds with differences after which the run ends."""
SHOWN = ("requests", "samples", "tokens", "preemptions", "updates", "aborts", "resumed", "faults")


@dataclass(frozen=True, slots=True)
class Plan:
    """What decides a world."""

    seed: int
    family: str
    path: ComputePath

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        where = "python benchmarks/reliability/fuzz_engine.py"
        return f"{where} --minutes 0 --seed {self.seed} --family {self.family} --path {self.path}"


@dataclass
class Totals:
    """Sums over all worlds."""

    worlds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    differences: dict[str, Differences] = field(default_factory=dict)
    failures: list[dict[str, object]] = field(default_factory=list)

    def add(self, plan: Plan, verdict: Verdict) -> None:
        """Add one world."""
        self.worlds += 1
        self.counts += verdict.counts
        self.counts[f"worlds {plan.path}"] += 1
        for kind, found in verdict.differences.items():
            total = self.differences.setdefault(kind, Differences())
            total.count += found.count
            total.worst = max(total.worst, found.worst)
        if verdict.faults:
            self.failures.append({"command": plan.command, "faults": verdict.faults})

    @property
    def worst(self) -> float:
        """The largest difference of a log-probability."""
        return max((one.worst for one in self.differences.values()), default=0.0)


def try_world(plan: Plan, wrap: Callable[[Runner], Runner] | None = None) -> Verdict:
    """Run and judge one world; whatever is raised is a fault of it. `wrap` may put something before the runner."""
    torch.manual_seed(plan.seed)  # initial values that Transformers draws before they are replaced
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="fuzz-engine-") as directory:
        world: World | None = None
        try:
            world = make_world(plan.seed, plan.family, plan.path, Path(directory), wrap)
            run_world(world)
            verdict = Judge(world).run()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))
            verdict.fault(f"{type(error).__name__}: {error} ({places})")
        finally:
            if world is not None:
                verdict.counts += world.counts
                release(world)
    return verdict


def plans(given: argparse.Namespace) -> list[Plan]:
    """Return the worlds of one round: each path of a family that the seed chooses."""
    paths = PATHS if given.path == "all" else (given.path,)
    family = random.Random(f"family {given.seed}").choice(given.family)
    return [Plan(given.seed, family, path) for path in paths]


def fuzz(given: argparse.Namespace) -> Totals:
    """Run worlds until the time is over or too many failed."""
    totals, began = Totals(), time.monotonic()
    while True:
        for plan in plans(given):
            verdict = try_world(plan)
            totals.add(plan, verdict)
            for what in verdict.faults:
                print(f"DIFFERENCE {what}\n  {plan.command}", flush=True)
        seconds = time.monotonic() - began
        is_over = seconds > 60 * given.minutes or len(totals.failures) >= MAX_FAILURES
        if is_over or totals.worlds % 60 == 0:
            shown = ", ".join(f"{totals.counts[name]:,} {name}" for name in SHOWN)
            print(f"{seconds:.0f} s: {totals.worlds} worlds, {shown}", flush=True)
        if is_over:
            for kind, found in sorted(totals.differences.items()):
                print(f"  {kind:22} {found.count:9,} compared, max {found.worst:.2e}")
            return totals
        given.seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the next ones count up")
    parser.add_argument("--family", choices=MODELS, nargs="+", default=MODELS, help="of which each seed chooses one")
    parser.add_argument("--path", choices=[*PATHS, "all"], default="all", help="cuda: that executor on a CPU")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    totals = fuzz(given)
    differences = {kind: asdict(found) for kind, found in sorted(totals.differences.items())}
    found = {"passed": not totals.failures, "worlds": totals.worlds, "max_difference": totals.worst}
    found |= {"counts": dict(sorted(totals.counts.items())), "differences": differences, "failures": totals.failures}
    print(json.dumps(found))
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
