"""Reads commits of upstream from a git repository. Raises `HistoryError` with one line for the user."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Sequence
from datetime import datetime
from io import BytesIO
from pathlib import Path

from benchmarks.nanochat_parity.commits import Commit


class HistoryError(Exception):
    """A repository, a checkout or a commit cannot be used."""


def commit_in(repository: Path, name: str) -> Commit:
    """Return a commit of a git directory: its short hash and its committer's time."""
    return _shown(["--git-dir", str(repository)], name, f"--repository {repository}")


def commit_of(checkout: Path, name: str = "HEAD") -> Commit:
    """Return the commit of a working tree, or another that its repository has."""
    if not (checkout / "nanochat" / "gpt.py").is_file():
        raise HistoryError(f"--checkout {checkout}: has no nanochat/gpt.py; give the root of a clone of nanochat")
    if not (checkout / ".git").exists():
        raise HistoryError(
            f"--checkout {checkout}: has no .git, so its commit is unknown; give a clone, "
            "or a git directory and a commit: --repository PATH/.git --commit HASH"
        )
    return _shown(["-C", str(checkout)], name, f"--checkout {checkout}")


def export(repository: Path, commit: str, directory: Path) -> None:
    """Write a commit's package `nanochat` to a directory."""
    archive = _git(["--git-dir", str(repository), "archive", commit, "nanochat"], f"--repository {repository}")
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(directory, filter="data")


def _shown(where: Sequence[str], name: str, flag: str) -> Commit:
    shown = ["show", "--no-patch", "--format=%H %cI", "--end-of-options", f"{name}^{{commit}}"]
    commit, time = _git([*where, *shown], flag).decode().split()
    return Commit(commit[:7], datetime.fromisoformat(time))


def _git(arguments: Sequence[str], flag: str) -> bytes:
    done = subprocess.run(["git", *arguments], capture_output=True, check=False)
    if done.returncode:
        first = done.stderr.decode(errors="replace").strip().splitlines()[:1]
        raise HistoryError(f"{flag}: git: {''.join(first)}")
    return done.stdout
