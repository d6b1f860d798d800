"""A worker that is lost between holding new weights and installing them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nano_inference import InferenceEngine, RolloutPool, WeightError, save_weights, weights_checksum
from nano_inference.rl.pool.local import LocalFleet, LocalWorker
from nano_inference.rl.pool.worker import WorkerDied
from nano_inference.weights.updates import WeightUpdate
from tests.pool.engines import PARAMS, PROMPTS, SEED, Engines, config_of, facts
from tests.weights.pairs import Pair


def raise_died(engines: Engines, index: int) -> None:
    raise WorkerDied(f"worker {index}: the connection was lost")


def raise_refused(engines: Engines, index: int) -> None:
    raise WeightError("holds no update")


def kill_engine(engines: Engines, index: int) -> None:
    engines.opened[index][-1].steps_left = 0


class LosingFleet(LocalFleet):
    """A fleet in which the workers of `lost` have an accident at their first commit."""

    accident: Callable[[int], None]
    lost: set[int]

    async def open(self, index: int) -> LocalWorker:
        worker = await super().open(index)
        commit = worker.commit

        async def lose() -> int:
            if index in self.lost:
                self.lost.remove(index)
                self.accident(index)
            return await commit()

        worker.commit = lose  # type: ignore[method-assign]
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
    fleet = LosingFleet(engines.open, 2)
    fleet.accident, fleet.lost = lambda index: accident(engines, index), set(lost)
    with RolloutPool(fleet, seed=SEED) as pool:
        assert pool.update_weights(untied.named(), blocking=blocking, version="new") == 1
        assert pool.finish_update() == 1 and pool.weight_info() == (1, "new", "idle")
        assert pool.num_replaced == len(lost)
        assert [len(engines.opened[index]) for index in (0, 1)] == [1 + (index in lost) for index in (0, 1)]
        assert pool.weights_checksum() == weights_checksum(untied.named().items())  # raises if the workers differ
        with InferenceEngine(config_of(untied)) as single:
            single.update_weights(untied.named(), blocking=True, version="new")
            assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
        assert all(one.num_computed for one in pool.facts().values())


class RecordingFleet(LocalFleet):
    """A fleet of one worker; `staged` is the number of tensors of each update that the latest one has staged."""

    staged: list[int]

    async def open(self, index: int) -> LocalWorker:
        worker = await super().open(index)
        stage, self.staged = worker.stage, []

        async def record(update: WeightUpdate) -> int:
            self.staged.append(0 if isinstance(update.weights, Path) else len(update.weights))
            return await stage(update)

        worker.stage = record  # type: ignore[method-assign]
        return worker


A, B, HEAD = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("updates", "replayed"),
    [
        ([[A]] * 9, [1]),
        ([[A, B], [A], [B], [A]], [1, 1]),
        ([None, [A], [A, B], [HEAD]], [-1, 2, 1]),
        ([[A], "a", [B], "a", [A]], [1, 1]),
        ([[A, HEAD], "ab", [HEAD]], [0, 1]),
    ],
)
def test_replacement_replays_the_latest_value_of_each_tensor(
    updates: list[list[str] | str | None], replayed: list[int], untied: Pair, tmp_path: Path
) -> None:
    """Updates are of these tensors, complete (None, -1 in `replayed`), or of a directory."""
    named = untied.named()
    directories = {"a": save_weights({A: named[A]}, tmp_path / "a")}
    directories["ab"] = save_weights({A: named[A] * 2, B: named[B]}, tmp_path / "ab")
    engines = Engines(untied)
    fleet = RecordingFleet(engines.open, 1)
    with RolloutPool(fleet, seed=SEED) as pool, InferenceEngine(config_of(untied)) as single:
        for number, names in enumerate(updates, 1):
            tensors = {name: named[name] * number for name in (named if names is None else names) if name in named}
            weights = directories[names] if isinstance(names, str) else tensors
            for one in (pool, single):
                one.update_weights(weights, blocking=True, partial=names is not None)
        engines.opened[0][-1].steps_left = 0
        assert pool.generate(PROMPTS[:1], PARAMS)[0].weight_version == len(updates)
        assert pool.num_replaced == 1 and fleet.staged == [len(named) if n < 0 else n for n in replayed]
        assert pool.weights_checksum() == single.weights_checksum()
