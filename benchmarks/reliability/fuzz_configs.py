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

CHUNK = 200
PROCESSES = 2
SHOWN_FAILURES = 10


def outcome(family: str, seed: int, index: int) -> Outcome:
    """Return the comparison of one random configuration."""
    return compared(random_config(family, random.Random(f"{seed} {family} {index}")), index)


def be_quiet() -> None:
    """Use one thread; log nothing: Transformers warns of most of these configurations."""
    torch.set_num_threads(1)
    logging.disable()
    transformers.logging.set_verbosity(logging.CRITICAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=2000, help="compared configurations of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FAMILIES, help="one family")
    parser.add_argument("--index", type=int, help="one configuration of --only")
    given = parser.parse_args()
    be_quiet()
    if given.index is not None:
        print(random_config(given.only, random.Random(f"{given.seed} {given.only} {given.index}")))
        print(*outcome(given.only, given.seed, given.index), sep=": ")
        return 0
    rows, failed = {}, 0
    print(f"{'family':12} {'equal':>6} {'refused':>8} {'failed':>7} {'no reference':>13}")
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), be_quiet) as pool:
        for family in [given.only] if given.only else FAMILIES:
            counts, failures, start = Counter[str](), list[str](), 0
            while counts.total() - counts["no reference"] < given.configs:
                indices = range(start, start + CHUNK)
                start = indices.stop
                work = partial(outcome, family, given.seed)
                for index, found in zip(indices, pool.map(work, indices, chunksize=50), strict=True):
                    counts[found.result] += 1
                    if found.result == "failed":
                        failures.append(f"--seed {given.seed} --only {family} --index {index}: {found.about}")
            rows[family], failed = dict(counts), failed + len(failures)
            results = (counts[name] for name in ("equal", "refused", "failed", "no reference"))
            print("{:12} {:6d} {:8d} {:7d} {:13d}".format(family, *results), flush=True)
            print("".join(f"  {failure}\n" for failure in failures[:SHOWN_FAILURES]), end="", flush=True)
    print(json.dumps({"passed": not failed, "transformers": transformers.__version__, "families": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
