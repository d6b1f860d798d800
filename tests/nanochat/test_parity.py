"""This package beside results that upstream's code gave at a commit of each generation.

`python -m benchmarks.nanochat_parity --repository PATH --record` wrote them: shapes, logits and token ids. The weights
are made from the names, so nothing of upstream is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.nanochat_parity.__main__ import RECORDED, main
from benchmarks.nanochat_parity.cases import KINDS, MIN_CALLS, cases
from benchmarks.nanochat_parity.commits import COMMITS, Commit, Conditions, at
from benchmarks.nanochat_parity.ours import TOLERANCE, Comparison, compare
from nano_inference.config import KernelsName

GENERATIONS = ("G0", "G0", "G1", "G2", "G2", "G2e", "G2s", "G2s", "G3", "G4", "G4")
EACH = pytest.mark.parametrize(("commit", "generation"), list(zip(COMMITS, GENERATIONS, strict=True)))


def compared(commit: Commit, conditions: Conditions, *, kernels: KernelsName = "auto", share: int = 3) -> Comparison:
    """Compare the long prompts, and one in `share` of the short ones: others for the next commit."""
    long, short = ([case for case in cases() if (len(case.prompt) > 100) == is_long] for is_long in (True, False))
    recorded = json.loads((RECORDED / f"{commit.hash}.json").read_text())
    return compare(recorded, conditions, long + short[COMMITS.index(commit) % share :: share], kernels=kernels)


@pytest.mark.slow
@EACH
def test_logits_streams_masks_and_batches_equal_those_of_upstream(commit: Commit, generation: str) -> None:
    found = compared(commit, commit.conditions)
    assert found.generation == generation and found.logits <= TOLERANCE
    assert {name: one for name, one in found.found.items() if one.equal != one.total} == {}
    assert {*KINDS, "batch"} == set(found.found)
    assert found.calls >= MIN_CALLS and found.forced >= 3 * MIN_CALLS, "results that the calculator inserted"


@pytest.mark.nightly
@pytest.mark.parametrize("kernels", ["auto", "off"])
@EACH
def test_all_cases_equal_those_of_upstream(commit: Commit, generation: str, kernels: KernelsName) -> None:
    assert compared(commit, commit.conditions, kernels=kernels, share=1).is_equal


@pytest.mark.slow
def test_torch_alone_equals_upstream_too() -> None:
    assert compared(COMMITS[-1], COMMITS[-1].conditions, kernels="off", share=9).is_equal


@pytest.mark.slow
def test_a_wrong_constant_is_noticed() -> None:
    g4 = COMMITS[-1]
    found = compared(g4, Conditions(overrides=("qk_scale=1.15",)), share=9)
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


@pytest.mark.slow
def test_code_that_fails_is_one_line_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").write_text("raise RuntimeError('needs a GPU')\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for words in (("init", "--quiet"), ("add", "."), (*who, "commit", "--quiet", "--message", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    monkeypatch.setattr(sys, "argv", ["nanochat_parity", "--repository", str(tmp_path), "--commit", "HEAD"])
    assert main() == 1
    assert "not compared: upstream's code failed: RuntimeError: needs a GPU" in capsys.readouterr().out
