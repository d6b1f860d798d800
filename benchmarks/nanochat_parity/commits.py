"""Commits of upstream's master, and what this package needs to equal each.

The weights of a model do not show everything that upstream's code of a day did with them. `at` returns the rest for any
commit, from its hash and time; `COMMITS` stand for the generations.
"""

from __future__ import annotations

from datetime import datetime
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


def _commit(commit: str, time: str) -> Commit:
    return Commit(commit, datetime.fromisoformat(time))


COMMITS = (
    _commit("306bc38", "2025-10-16T10:04:43-07:00"),
    _commit("eb7bbc1", "2026-01-04T19:14:23+00:00"),
    _commit("f9a7e0f", "2026-01-17T12:27:30-08:00"),
    _commit("63bb583", "2026-01-18T15:27:41+00:00"),
    _commit("535f664", "2026-02-02T19:41:42+01:00"),
    _commit("c8d93be", "2026-01-27T22:31:17+00:00"),
    _commit("aba30cb", "2026-03-03T00:38:53+00:00"),
    _commit("1076f97", "2026-03-04T23:55:30+00:00"),
    _commit("6ed7d1d", "2026-03-09T20:45:17+00:00"),
    _commit("a825e63", "2026-03-14T17:03:06+00:00"),
    _commit("92d63d4", "2026-07-03T22:54:57+00:00"),
)
