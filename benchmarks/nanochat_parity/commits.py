"""Commits of upstream's master, what this package needs to equal each, and how they are read from a repository.

The weights of a model do not show everything that upstream's code of a day did with them. `at` returns the rest for any
commit, from its hash and time; `COMMITS` stand for the generations.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Sequence
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from nano_inference.nanochat.checkpoint import constants_at

EACH_FIRST_TOKEN = datetime.fromisoformat("2025-12-28T04:52:13+00:00")
"""8f979a8: each sample draws its first token; before, the samples shared one."""
FALLBACK_WITHOUT_WINDOWS = datetime.fromisoformat("2026-01-16T17:39:41+00:00")
"""b62a5bc: steps with a cache ignore windows, without FlashAttention 3."""
FALLBACK_WITH_WINDOWS = datetime.fromisoformat("2026-01-30T17:32:12+00:00")
"""3ba42e8: they follow them."""


class Conditions(NamedTuple):
    """How results of a commit are compared."""

    overrides: tuple[str, ...] = ()
    """Constants of that day that the weights do not show (docs/nanochat.md)."""
    is_first_shared: bool = False
    """True if all samples have the same first token: only cases without a choice there are compared."""


def at(commit: str, time: datetime) -> Conditions:
    """Return the conditions of a commit of master, from its hash and its committer's time."""
    overrides = []
    if FALLBACK_WITHOUT_WINDOWS <= time < FALLBACK_WITH_WINDOWS:
        overrides.append("decode_window=full")
    recorded = constants_at(commit)
    if recorded.get("generation") == "G2s":
        overrides += [f"{name}={value}" for name, value in recorded.items()]
    return Conditions(tuple(overrides), time < EACH_FIRST_TOKEN)


class Commit(NamedTuple):
    """One commit."""

    hash: str
    time: datetime

    @property
    def conditions(self) -> Conditions:
        """How its results are compared."""
        return at(self.hash, self.time)


COMMITS = tuple(
    Commit(line.split()[0], datetime.fromisoformat(line.split()[1]))
    for line in """306bc38 2025-10-16T10:04:43-07:00
eb7bbc1 2026-01-04T19:14:23+00:00
f9a7e0f 2026-01-17T12:27:30-08:00
63bb583 2026-01-18T15:27:41+00:00
535f664 2026-02-02T19:41:42+01:00
c8d93be 2026-01-27T22:31:17+00:00
aba30cb 2026-03-03T00:38:53+00:00
1076f97 2026-03-04T23:55:30+00:00
6ed7d1d 2026-03-09T20:45:17+00:00
a825e63 2026-03-14T17:03:06+00:00
92d63d4 2026-07-03T22:54:57+00:00""".splitlines()
)


class HistoryError(Exception):
    """A repository or a commit cannot be used."""


def commit_in(repository: Path, name: str) -> Commit:
    """Return a commit of a repository: its short hash and its committer's time."""
    shown = ["show", "--no-patch", "--format=%H %cI", "--end-of-options", f"{name}^{{commit}}"]
    commit, time = _git(repository, shown).decode().split()
    return Commit(commit[:7], datetime.fromisoformat(time))


def export(repository: Path, commit: str, directory: Path) -> None:
    """Write a commit's package `nanochat` to a directory."""
    with tarfile.open(fileobj=BytesIO(_git(repository, ["archive", commit, "nanochat"]))) as files:
        files.extractall(directory, filter="data")


def _git(repository: Path, arguments: Sequence[str]) -> bytes:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    if done.returncode:
        first = done.stderr.decode(errors="replace").strip().splitlines()[:1]
        raise HistoryError(f"--repository {repository}: git: {''.join(first)}")
    return done.stdout
