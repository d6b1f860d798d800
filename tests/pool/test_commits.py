"""A worker that is lost between holding new weights and installing them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nano_inference import InferenceEngine, RolloutPool, WeightError, weights_checksum
from nano_inference.pool.local import LocalFleet, LocalWorker
from nano_inference.pool.worker import WorkerDied
from tests.pool.engines import PARAMS, PROMPTS, SEED, Engines, config_of, facts
from tests.weights.pairs import Pair


def raise_died(engines: Engines, index: int) -> None:
    raise WorkerDied(f"worker {index}: the connection was lost")


def raise_refused(engines: Engines, index: int) -> None:
    raise WeightError("holds no update")


def kill_engine(engines: Engines, index: int) -> None:
    engines.opened[index][-1].steps_left = 0


class Losing(LocalWorker):
    """A worker that has an accident at its first commit."""

    def __init__(self, fleet: LosingFleet, index: int) -> None:
        super().__init__(f"worker {index}", lambda: fleet.engines.open(index))
        self._fleet, self._index = fleet, index

    async def commit(self) -> int:
        if self._index in self._fleet.lost:
            self._fleet.lost.remove(self._index)
            self._fleet.accident(self._fleet.engines, self._index)
        return await super().commit()


class LosingFleet(LocalFleet):
    """A fleet in which the workers of `lost` have an accident at a commit."""

    def __init__(self, engines: Engines, accident: Callable[[Engines, int], None], lost: set[int]) -> None:
        super().__init__(engines.open, 2)
        self.engines, self.accident, self.lost = engines, accident, lost

    async def open(self, index: int) -> LocalWorker:
        worker = Losing(self, index)
        await worker.open()
        return worker


@pytest.mark.parametrize(
    ("accident", "lost", "blocking"),
    [(raise_died, {1}, False), (raise_refused, {0}, True), (kill_engine, {1}, True), (kill_engine, {0, 1}, True)],
    ids=["connection lost", "refused", "engine dead", "both engines dead"],
)
def test_worker_lost_at_its_commit_is_replaced_and_gets_the_new_weights(
    accident: Callable[[Engines, int], None], lost: set[int], blocking: bool, untied: Pair
) -> None:
    engines = Engines(untied)
    with RolloutPool(LosingFleet(engines, accident, set(lost)), seed=SEED) as pool:
        assert pool.update_weights(untied.named(), blocking=blocking, version="new") == 1
        assert pool.finish_update() == 1 and pool.weight_info() == (1, "new", "idle")
        assert pool.num_replaced == len(lost)
        assert [len(engines.opened[index]) for index in (0, 1)] == [1 + (index in lost) for index in (0, 1)]
        assert pool.weights_checksum() == weights_checksum(untied.named().items())  # raises if the workers differ
        with InferenceEngine(config_of(untied)) as single:
            single.update_weights(untied.named(), blocking=True, version="new")
            assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
        assert all(one.num_computed for one in pool.facts().values())
