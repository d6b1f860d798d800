"""Compare this package with upstream's code, commit by commit, and print a table.

    python -m benchmarks.nanochat_parity [--repository PATH [--commit NAME …] [--override NAME=VALUE …] [--record]]

--repository is a clone of karpathy/nanochat or its git directory. Each of the commits (default: those of the
recordings) is exported to a temporary directory and runs in a process of its own. Constants of the day that the weights
do not show follow from the commit; --override changes them. Without a repository the recordings in
tests/nanochat/recorded are compared; --record writes them anew: shapes, logits and token ids.

Legend: logits = largest difference of float32 logits; the other columns count rows with the same tokens and masks, up
to a row's first terminal (batch: results of `generate_batch`); calls = results that the calculator inserted, and their
tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.nanochat_parity.cases import KINDS, cases, has_bigrams
from benchmarks.nanochat_parity.commits import COMMITS, Commit, Conditions, HistoryError, commit_in, export
from benchmarks.nanochat_parity.ours import compare
from nano_inference.types import ModelError

RECORDED = Path(__file__).parents[2] / "tests" / "nanochat" / "recorded"
COLUMNS = (*KINDS[:-1], "batch", "naive")
ONE_FIRST_TOKEN = (
    "upstream gave all samples the same first token until 8f979a8: only greedy ones and single ones compared"
)
NO_CACHE = "upstream's cache did not keep the previous token's bigram: its engine ran without a cache"


def run_upstream(checkout: Path, conditions: Conditions) -> dict[str, Any]:
    """Return the results of upstream's code. Raises `HistoryError` with its last line of error."""
    command = [sys.executable, str(Path(__file__).with_name("upstream.py")), str(checkout)]
    command += ["first-shared"] if conditions.is_first_shared else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HistoryError(f"upstream's code failed: {''.join(done.stderr.strip().splitlines()[-1:])}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def results_of(repository: Path | None, commit: Commit, conditions: Conditions) -> dict[str, Any]:
    """Return upstream's results at a commit: of the repository, or the recording."""
    if repository is None:
        found: dict[str, Any] = json.loads((RECORDED / f"{commit.hash}.json").read_text())
        return found
    with tempfile.TemporaryDirectory() as directory:
        export(repository, commit.hash, Path(directory))
        return run_upstream(Path(directory), conditions)


def compared(wish: argparse.Namespace, commit: Commit) -> bool:
    """Compare a commit and print its row; return whether everything is equal."""
    given = commit.conditions
    conditions = given._replace(overrides=(*given.overrides, *wish.override))
    recorded = results_of(wish.repository, commit, conditions)
    if wish.record:
        (RECORDED / f"{commit.hash}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    found = compare(recorded, conditions, list(cases()))
    cells = " ".join(f"{found.found.get(name, '–')!s:>7}" for name in COLUMNS)
    head = f"{found.generation:4} {commit.hash:8} {commit.time.date()} {found.logits:8.1e}"
    print(f"{head} {cells} {f'{found.calls} ({found.forced})':>9}  {' '.join(found.overrides)}".rstrip())
    if conditions.is_first_shared:
        print(f"  {ONE_FIRST_TOKEN}")
    if has_bigrams(recorded["shapes"]):
        print(f"  {NO_CACHE}")
    sys.stdout.flush()
    return found.is_equal


def main() -> int:
    """Return 1 if a result differs or cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, help="clone or git directory of karpathy/nanochat")
    parser.add_argument("--commit", action="append", default=[], help="a commit, any number of times")
    parser.add_argument(
        "--override", action="append", default=[], help="another constant than the commit's: softcap=20"
    )
    parser.add_argument("--record", action="store_true", help="write the results to tests/nanochat/recorded")
    wish = parser.parse_args()
    if (wish.commit or wish.record) and not wish.repository:
        parser.error("--commit and --record need --repository")
    torch.set_num_threads(1)  # as on upstream's side
    print(f"{'':4} {'commit':8} {'date':10} {'logits':>8} {' '.join(f'{name:>7}' for name in COLUMNS)} {'calls':>9}")
    is_equal = True
    try:
        for commit in [commit_in(wish.repository, name) for name in wish.commit] or COMMITS:
            try:
                is_equal = compared(wish, commit) and is_equal
            except (HistoryError, ModelError) as error:
                print(f"     {commit.hash:8} {commit.time.date()} not compared: {error}", flush=True)
                is_equal = False
    except HistoryError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
