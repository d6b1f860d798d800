"""Compares random `config.json`s of every family with Transformers: equal log-probabilities, or a refusal by name.

    python benchmarks/reliability/fuzz_configs.py [--configs N] [--seed N] [--only FAMILY [--index N]]

Fields are absent, null, of another family, or of an older or newer form; the weights are random. Of each family, N
configurations that Transformers can compute are compared: log-probabilities of 24 tokens within 1e-4, or a refusal
that names a field. One line for each family; the last line is one JSON object. A failure is printed with the options
that repeat it, and makes the exit status 1. The configurations are those of tests/models/configurations.py. About
seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.models.configurations import FAMILIES, Outcome, compared, random_config

CONFIGS = 2000
CHUNK = 50
PROCESSES = 2
SHOWN_FAILURES = 10


def outcome(family: str, seed: int, index: int) -> Outcome:
    """Return the comparison of one random configuration."""
    return compared(random_config(family, random.Random(f"{seed} {family} {index}")), index)


def chunk(family: str, seed: int, start: int) -> list[Outcome]:
    """Return the comparisons of `CHUNK` configurations."""
    return [outcome(family, seed, index) for index in range(start, start + CHUNK)]


def be_quiet() -> None:
    """Use one thread; log nothing: Transformers warns of most of these configurations."""
    torch.set_num_threads(1)
    logging.disable()
    transformers.logging.set_verbosity(logging.CRITICAL)


def fuzz(pool: ProcessPoolExecutor, family: str, seed: int, configs: int) -> tuple[Counter[str], list[str]]:
    """Compare at least `configs` configurations of a family; return how many had each result, and the failures."""
    counts, failures, start = Counter[str](), [], 0
    while counts.total() - counts["no reference"] < configs:
        starts = range(start, start + CHUNK * PROCESSES * 2, CHUNK)
        for first, found in zip(starts, pool.map(partial(chunk, family, seed), starts), strict=True):
            counts.update(one.result for one in found)
            failures += [
                f"--seed {seed} --only {family} --index {first + at}: {one.about}"
                for at, one in enumerate(found)
                if one.result == "failed"
            ]
        start = starts.stop
    return counts, failures


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Compare random configurations with Transformers.")
    parser.add_argument("--configs", type=int, default=CONFIGS, help="compared configurations of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FAMILIES, help="one family")
    parser.add_argument("--index", type=int, help="one configuration of --only")
    return parser.parse_args()


def main() -> int:
    """Run the command line."""
    given = arguments()
    be_quiet()
    if given.index is not None:
        print(random_config(given.only, random.Random(f"{given.seed} {given.only} {given.index}")))
        print(*outcome(given.only, given.seed, given.index), sep=": ")
        return 0
    rows, failed = {}, 0
    print(f"{'family':12} {'equal':>6} {'refused':>8} {'failed':>7} {'no reference':>13}")
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), be_quiet) as pool:
        for family in [given.only] if given.only else FAMILIES:
            counts, failures = fuzz(pool, family, given.seed, given.configs)
            rows[family], failed = dict(counts), failed + len(failures)
            results = (counts[name] for name in ("equal", "refused", "failed", "no reference"))
            print("{:12} {:6d} {:8d} {:7d} {:13d}".format(family, *results), flush=True)
            for failure in failures[:SHOWN_FAILURES]:
                print(f"  {failure}", flush=True)
    print(json.dumps({"passed": not failed, "transformers": transformers.__version__, "families": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
