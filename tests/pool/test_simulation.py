"""The router against random choice and round robin, on simulated replicas."""

from __future__ import annotations

import random

import pytest

from benchmarks.routing import WORK, Outcome, routers, simulate

REPLICAS = 32


def outcomes(work: str) -> dict[str, Outcome]:
    return {
        kind: simulate(router, WORK[work](random.Random(0), 20 * REPLICAS), REPLICAS, random.Random(1))
        for kind, router in routers(REPLICAS, 0).items()
    }


@pytest.mark.parametrize("work", ["groups", "sessions", "system prompts"])
def test_common_prefixes_are_computed_less_often(work: str) -> None:
    found = outcomes(work)
    for other in ("random", "round robin"):
        assert found["prefix"].hits > 1.3 * found[other].hits
    assert found["prefix"].mean_wait < found["random"].mean_wait


@pytest.mark.parametrize("work", list(WORK))
def test_no_replica_has_much_more_work_than_the_average(work: str) -> None:
    found = outcomes(work)
    assert found["prefix"].spread < (1.2 if work in ("groups", "nothing shared") else 2.2)
