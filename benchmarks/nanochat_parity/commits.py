"""Commits of upstream's master that stand for a generation of its models, and what this package needs to equal each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.nanochat_parity.cases import KINDS


class Commit(NamedTuple):
    """One commit."""

    generation: str
    hash: str
    date: str
    overrides: tuple[str, ...] = ()
    """Constants of that day that the weights do not show (docs/nanochat.md)."""
    kinds: tuple[str, ...] = KINDS
    """Cases that this package is meant to equal."""
    why: str = ""
    """Why the other kinds are left out."""


ONE_SAMPLE = ("greedy", "seeded", "naive")
COMMITS = (
    Commit(
        "G0",
        "306bc38",
        "2025-10-16",
        kinds=ONE_SAMPLE,
        why="upstream gave all samples the same first token until 8f979a8",
    ),
    Commit("G0", "eb7bbc1", "2026-01-04"),
    Commit("G1", "f9a7e0f", "2026-01-17", ("decode_window=full",)),
    Commit("G2", "63bb583", "2026-01-18", ("decode_window=full",)),
    Commit("G2", "535f664", "2026-02-02"),
    Commit(
        "G2e",
        "c8d93be",
        "2026-01-27",
        kinds=("naive",),
        why="upstream's cache did not keep the previous token's bigram",
    ),
    Commit("G2s", "aba30cb", "2026-03-02", ("generation=G2s", "rope_dtype=bfloat16")),
    Commit("G2s", "1076f97", "2026-03-04", ("generation=G2s",)),
    Commit("G3", "6ed7d1d", "2026-03-09"),
    Commit("G4", "a825e63", "2026-03-14"),
    Commit("G4", "92d63d4", "2026-07-03"),
)
