"""This package beside results that upstream's code gave at a commit of each generation.

`python -m benchmarks.nanochat_parity --repository PATH --record` wrote them: shapes, logits and token ids. The weights
are made from the names, so nothing of upstream is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from benchmarks.nanochat_parity.__main__ import RECORDED, main
from benchmarks.nanochat_parity.cases import KINDS, MIN_CALLS, Case, cases
from benchmarks.nanochat_parity.commits import COMMITS, Commit, Conditions, at
from benchmarks.nanochat_parity.ours import TOLERANCE, Comparison, compare
from nano_inference.config import KernelsName
from tests.effort import IS_THOROUGH, some


@cache
def compared(commit: Commit, conditions: Conditions, kernels: KernelsName = "auto") -> Comparison:
    recorded = json.loads((RECORDED / f"{commit.hash}.json").read_text())
    return compare(recorded, conditions, some_cases(COMMITS.index(commit)), kernels=kernels)


def some_cases(place: int) -> list[Case]:
    """Return the long prompts, and a share of the short ones: another for the next place."""
    long, short = ([case for case in cases() if (len(case.prompt) > 100) == is_long] for is_long in (True, False))
    step = round(len(short) / some(len(short)))
    return long + short[place % step :: step]


def each_commit(commit: Commit) -> str:
    return commit.hash


@pytest.mark.parametrize("commit", COMMITS, ids=each_commit)
def test_logits_streams_masks_and_batches_equal_those_of_upstream(commit: Commit) -> None:
    found = compared(commit, commit.conditions)
    assert found.logits <= TOLERANCE
    assert {name: one for name, one in found.found.items() if one.equal != one.total} == {}
    assert {*KINDS, "batch"} == set(found.found)


@pytest.mark.parametrize("commit", [*(COMMITS[1:2] if IS_THOROUGH else ()), COMMITS[-1]], ids=each_commit)
def test_torch_alone_equals_upstream_too(commit: Commit) -> None:
    assert compared(commit, commit.conditions, "off").is_equal


@pytest.mark.parametrize("commit", COMMITS, ids=each_commit)
def test_each_recording_has_results_that_the_calculator_inserted(commit: Commit) -> None:
    found = compared(commit, commit.conditions)
    assert found.calls >= MIN_CALLS and found.forced >= 3 * MIN_CALLS


def test_all_generations_are_recorded() -> None:
    found = [compared(commit, commit.conditions).generation for commit in COMMITS]
    assert found == ["G0", "G0", "G1", "G2", "G2", "G2e", "G2s", "G2s", "G3", "G4", "G4"]


def test_a_wrong_constant_is_noticed() -> None:
    g4 = COMMITS[-1]
    found = compared(g4, Conditions(overrides=("qk_scale=1.15",)))
    assert found.logits > TOLERANCE and not found.is_equal


@pytest.mark.parametrize(
    ("commit", "time", "overrides", "is_first_shared"),
    [
        ("3a5e0bc", "2025-10-13T06:49:24-07:00", (), True),
        ("8f979a8", "2025-12-28T04:52:13+00:00", (), False),
        ("8203efa", "2026-01-16T17:37:51+00:00", (), False),
        ("b62a5bc", "2026-01-16T17:39:41+00:00", ("decode_window=full",), False),
        ("2e17723", "2026-01-30T09:21:02-08:00", ("decode_window=full",), False),
        ("3ba42e8", "2026-01-30T17:32:12+00:00", (), False),
        ("0c4ce36", "2026-02-18T22:57:15+01:00", (), False),
        ("aba30cb", "2026-03-03T00:38:53+00:00", ("generation=G2s", "rope_dtype=bfloat16"), False),
        ("1076f97", "2026-03-04T23:55:30+00:00", ("generation=G2s",), False),
        ("6ed7d1d", "2026-03-09T20:45:17+00:00", (), False),
    ],
)
def test_constants_of_the_day_follow_from_the_commit(
    commit: str, time: str, overrides: tuple[str, ...], is_first_shared: bool
) -> None:
    assert at(commit, datetime.fromisoformat(time)) == Conditions(overrides, is_first_shared)


def ran(monkeypatch: pytest.MonkeyPatch, *options: object) -> int:
    monkeypatch.setattr(sys, "argv", ["nanochat_parity", *map(str, options)])
    return main()


def git(directory: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(directory), *words], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository in place of upstream's: its code fails at once."""
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").write_text("raise RuntimeError('needs a GPU')\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    git(tmp_path, *who, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_code_that_fails_is_one_line_in_the_table(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "--checkout", clone) == 1
    assert "not compared: upstream's code failed: RuntimeError: needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("nanochat/gpt.py", "has no nanochat/gpt.py; give the root of a clone of nanochat"),
        (".git", "has no .git, so its commit is unknown; give a clone, or a git directory and a commit"),
    ],
)
def test_a_directory_that_is_no_clone_is_refused(
    clone: Path, missing: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone / missing).rename(clone / "moved")
    assert ran(monkeypatch, "--checkout", clone) == 1
    assert f"--checkout {clone}: {message}" in capsys.readouterr().err


def test_a_commit_that_the_repository_lacks_is_refused(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "--repository", clone / ".git", "--commit", "0123abc") == 1
    assert f"--repository {clone / '.git'}: git: fatal: " in capsys.readouterr().err
