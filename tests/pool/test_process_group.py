"""A trainer's process group as the source of a pool's update."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nano_inference import InferenceEngine, RolloutPool, WeightError, WeightGroup, weights_checksum
from tests.pool.engines import PARAMS, PROMPTS, SEED, Engines, config_of, facts
from tests.weights.pairs import Pair
from tests.weights.test_group import fail_during_send, send_wrong_then_right, trainer_process

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(untied: Pair) -> Iterator[RolloutPool]:
    with RolloutPool(Engines(untied).fleet(), seed=SEED) as one:
        yield one


def test_pool_updates_from_a_broadcast_and_rejects_a_wrong_one(pool: RolloutPool, untied: Pair, tmp_path: Path) -> None:
    old = pool.weights_checksum()
    with trainer_process(send_wrong_then_right, untied.named(), tmp_path) as port:
        group = WeightGroup("127.0.0.1", port, rank=1, world_size=2, timeout=60)
        with pytest.raises(WeightError, match=r"the update has the shape .*; all workers keep version 0"):
            pool.update_weights(group.receive(), blocking=True)
        assert pool.weights_checksum() == old
        assert pool.update_weights(group.receive(), blocking=True, version="sent") == 1
        group.close()
    assert pool.weights_checksum() == weights_checksum(untied.named().items())
    with InferenceEngine(config_of(untied)) as single:
        single.update_weights(untied.named(), blocking=True, version="sent")
        assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))


def test_a_trainer_that_dies_during_a_broadcast_leaves_all_on_the_old_weights(
    pool: RolloutPool, untied: Pair, tmp_path: Path
) -> None:
    old = pool.weights_checksum()
    with trainer_process(partial(fail_during_send, does_exit=True), untied.named(), tmp_path) as port:
        group = WeightGroup("127.0.0.1", port, rank=1, world_size=2, timeout=60)
        with pytest.raises(WeightError, match="the broadcast failed, the group is closed"):
            pool.update_weights(group.receive())
        with pytest.raises(WeightError, match="join a new one"):
            pool.update_weights(group.receive())
    assert pool.weights_checksum() == old and pool.weight_info() == (0, None, "idle")
    assert [one.version for one in pool.facts().values()] == [0, 0] and pool.num_replaced == 0
    assert pool.update_weights(untied.named(), blocking=True) == 1
