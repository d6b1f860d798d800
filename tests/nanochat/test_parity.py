"""This package beside results that upstream's code gave at a commit of each generation.

`python -m benchmarks.nanochat_parity --repository PATH --record` wrote them: shapes, logits and token ids. The weights
are made from the names, so nothing of upstream is needed.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.nanochat_parity.__main__ import RECORDED
from benchmarks.nanochat_parity.commits import COMMITS, Commit
from benchmarks.nanochat_parity.ours import TOLERANCE, Comparison, compare
from nano_inference.config import KernelsName


def compared(commit: Commit, kernels: KernelsName = "auto") -> Comparison:
    return compare(json.loads((RECORDED / f"{commit.hash}.json").read_text()), commit.overrides, kernels=kernels)


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: f"{commit.generation}-{commit.hash}")
def test_logits_streams_masks_and_batches_equal_those_of_upstream(commit: Commit) -> None:
    found = compared(commit)
    assert found.logits <= TOLERANCE
    assert {name: one for name, one in found.found.items() if one.equal != one.total} == {}
    assert set(commit.kinds) <= set(found.found)


@pytest.mark.parametrize("commit", [COMMITS[1], COMMITS[-1]], ids=lambda commit: str(commit.generation))
def test_torch_alone_equals_upstream_too(commit: Commit) -> None:
    assert compared(commit, "off").is_equal


def test_the_recordings_have_calls_of_the_tool() -> None:
    counts = [compared(commit) for commit in COMMITS[-2:]]
    assert sum(one.calls for one in counts) >= 4 and sum(one.forced for one in counts) >= 20


def test_a_wrong_constant_is_noticed() -> None:
    g4 = COMMITS[-1]
    found = compared(g4._replace(overrides=("qk_scale=1.15",)))
    assert found.logits > TOLERANCE and not found.is_equal
