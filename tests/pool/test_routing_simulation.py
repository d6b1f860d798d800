"""The simulation of `benchmarks/routing.py`: prefix routing finds more in the caches and keeps the work balanced."""

from __future__ import annotations

import random

import pytest

from benchmarks.routing import WORKLOADS, policies, simulate, table


@pytest.mark.parametrize("name", WORKLOADS)
def test_prefix_routing_hits_more_and_stays_balanced(name: str) -> None:
    results = {
        policy: simulate(router, WORKLOADS[name](random.Random(1), 20), 20, 1000)
        for policy, router in policies(20, 1).items()
    }
    prefix, others = results.pop("prefix"), results.values()
    if name == "uniform":
        assert prefix.hits == 0
    else:
        assert all(prefix.hits > 1.1 * other.hits for other in others)
    assert prefix.spread < min(2.5, results["random"].spread)


def test_the_table_has_a_line_for_each_workload_and_size() -> None:
    assert len(list(table([2, 3], 1, 0))) == 2 + 2 * len(WORKLOADS)
