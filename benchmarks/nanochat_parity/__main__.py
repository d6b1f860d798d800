"""Compare this package with upstream's code, commit by commit, and print a table.

--repository is a git directory of karpathy/nanochat with its history; each commit is exported to a temporary directory
and runs in its own process. --checkout is a single working tree instead, of any commit. Without either, the
recordings in tests/nanochat/recorded are compared; --record writes them anew: shapes, logits and token ids.

Legend: logits = largest difference of float32 logits; the other columns count rows with the same tokens and masks, up
to a row's first terminal (batch: results of `generate_batch`); calls = results that the calculator inserted, and their
tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.nanochat_parity.cases import KINDS
from benchmarks.nanochat_parity.commits import COMMITS, Commit
from benchmarks.nanochat_parity.ours import Comparison, compare

RECORDED = Path(__file__).parents[2] / "tests" / "nanochat" / "recorded"
COLUMNS = (*KINDS[:-1], "batch", "naive")


def run_upstream(checkout: Path, commit: Commit) -> dict[str, Any]:
    """Return the results of upstream's code. Raises `CalledProcessError`."""
    command = [sys.executable, str(Path(__file__).with_name("upstream.py")), str(checkout), ",".join(commit.kinds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def export(repository: Path, commit: str, directory: Path) -> None:
    """Write a commit's files to a directory."""
    command = ["git", "--git-dir", str(repository), "archive", commit, "nanochat"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(directory, filter="data")


def recordings(wish: argparse.Namespace) -> Iterator[tuple[Commit, dict[str, Any]]]:
    """Yield each commit with upstream's results."""
    if wish.checkout is not None:
        overrides = tuple(wish.override)
        commit = Commit("?", wish.checkout.name[:12], "", overrides)
        yield commit, run_upstream(wish.checkout, commit)
        return
    for commit in COMMITS:
        if wish.repository is None:
            yield commit, json.loads((RECORDED / f"{commit.hash}.json").read_text())
            continue
        with tempfile.TemporaryDirectory() as directory:
            export(wish.repository, commit.hash, Path(directory))
            yield commit, run_upstream(Path(directory), commit)


def line_of(commit: Commit, found: Comparison) -> str:
    """Return a row of the table."""
    cells = [str(found.found.get(name, "–")) for name in COLUMNS]
    calls = f"{found.calls} ({found.forced})"
    head = f"{commit.generation:4} {commit.hash:12} {commit.date:10} {found.logits:8.1e}"
    return f"{head} {' '.join(f'{cell:>7}' for cell in cells)} {calls:>9}  {' '.join(commit.overrides)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, help="git directory of karpathy/nanochat")
    parser.add_argument("--checkout", type=Path, help="one working tree of it")
    parser.add_argument("--override", action="append", default=[], help="a constant of that commit: softcap=20")
    parser.add_argument("--kernels", default="auto", help="auto, or off for torch alone")
    parser.add_argument("--record", action="store_true", help="write the results to tests/nanochat/recorded")
    wish = parser.parse_args()
    print(f"{'':4} {'commit':12} {'date':10} {'logits':>8} {' '.join(f'{name:>7}' for name in COLUMNS)} {'calls':>9}")
    is_equal = True
    for commit, recorded in recordings(wish):
        if wish.record:
            RECORDED.mkdir(exist_ok=True)
            (RECORDED / f"{commit.hash}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
        found = compare(recorded, commit.overrides, kernels=wish.kernels)
        is_equal = is_equal and found.is_equal
        print(line_of(commit, found), flush=True)
    for commit in COMMITS if wish.checkout is None else ():
        if commit.why:
            print(f"{commit.hash}: {', '.join(commit.kinds)} only: {commit.why}")
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
