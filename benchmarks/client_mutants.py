"""Break the server for each test file of docs/clients.md, one change at a time, and check that the file notices it.

    python benchmarks/client_mutants.py [--only CLIENT] [--python .venv-clients/bin/python]

The changes are in `mutation/client_changes.py`. Each is made in a copy of the sources, with which the file's tests run
until one fails: those of tests/clients in the environment of `make test-clients`, others in that of `make test`. The
table has the test that failed; the exit code is 1 if a change was not noticed, or if a client that is not installed was
skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutation.client_changes import CHANGES, Change

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nano_inference"
TIMEOUT_S = 900.0
_WHERE = "import pathlib, nano_inference; print(pathlib.Path(nano_inference.__file__).parent)"


def main() -> int:
    """Make each change, print a row for it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="name of a client, such as aider or server/slime")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-clients" / "bin" / "python")
    parser.add_argument("--own-python", type=Path, default=ROOT / ".venv" / "bin" / "python")
    given = parser.parse_args()
    chosen = [change for change in CHANGES if given.only in ("", change.client)]
    assert chosen, "no such client"
    pythons = [given.python if one.test.startswith("tests/clients/") else given.own_python for one in chosen]
    assert all(one.exists() for one in pythons), "`make .venv-clients/ready` was not run"
    print("| file | what was broken | the test that failed |\n|---|---|---|", flush=True)
    failed = [failing_test(change, python) for change, python in zip(chosen, pythons, strict=True)]
    num_red = sum(name is not None for name in failed)
    print(f"\n{num_red} of {len(chosen)} changes were noticed.", flush=True)
    return 0 if num_red == len(chosen) else 1


def failing_test(change: Change, python: Path) -> str | None:
    """Print the row of a change; return the name of the test that failed, None if none did."""
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        apply(change, copy)
        environment = os.environ | {"PYTHONPATH": home}
        used = subprocess.check_output([python, "-c", _WHERE], env=environment, cwd=home, text=True).strip()
        assert Path(used).samefile(copy), f"{python} imports {used}, not the changed copy"
        command = [python, "-m", "pytest", "-x", "-q", change.test]
        ended = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    found = re.search(r"^(?:FAILED|ERROR) \S+?::(\w+)", ended.stdout, re.MULTILINE)
    name = found[1] if ended.returncode == 1 and found else None
    shown = f"`{name}`" if name else "NONE" if ended.returncode == 0 else f"pytest ended with {ended.returncode}"
    print(f"| `{change.test.removeprefix('tests/clients/')}` | {change.breaks} | {shown} |", flush=True)
    return name


def apply(change: Change, package: Path) -> None:
    """Make a change in a copy of the package."""
    changed = package / "server" / change.path
    text = changed.read_text()
    assert text.count(change.old) == 1, f"{change.path} has {change.old!r} {text.count(change.old)} times"
    changed.write_text(text.replace(change.old, change.new))


if __name__ == "__main__":
    sys.exit(main())
