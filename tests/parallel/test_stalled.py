"""Ranks that hang: they answer commands but no longer receive weights, or do neither."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from nano_inference import InferenceEngine
from nano_inference.executors.protocol import Executor
from nano_inference.types import EngineDead, WeightError
from tests.models.families import make_model
from tests.parallel.ranks import open_ranks
from tests.parallel.test_engine import assert_same
from tests.parallel.test_processes import ranks_of
from tests.parallel.test_updates import PARAMS, PROMPTS, config, weights_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stalled")
    make_model("llama3-rope-ratio3-tied", directory)
    return directory


class Stall:
    """Where a rank waits: `is_reached` is set by it, `may_go` releases it."""

    def __init__(self) -> None:
        self.is_reached, self.may_go = threading.Event(), threading.Event()


class Stalling:
    """An executor, its weights, or an update of them, that waits inside one of an update's methods."""

    def __init__(self, own: Any, method: str, stall: Stall) -> None:
        self._own, self._method, self._stall = own, method, stall

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._stall.is_reached.set()
            self._stall.may_go.wait()
        found = getattr(self._own, name)
        if name == "weights":
            return Stalling(found, self._method, self._stall)
        return (lambda **options: Stalling(found(**options), self._method, self._stall)) if name == "stage" else found


@contextmanager
def stalled(path: Path, method: str, wait: float) -> Iterator[tuple[InferenceEngine, Stall]]:
    """Open an engine whose rank 1 stalls in a method of `Staged`."""
    stall = Stall()

    def changed(own: Executor) -> Executor:
        return cast(Executor, Stalling(own, method, stall))

    kill = stall.may_go.set  # the links are closed, so that the rank ends
    with open_ranks(config(path, 2), wait=timedelta(seconds=wait), changed=changed, on_failure=kill) as engine:
        try:
            yield engine, stall
        finally:
            stall.may_go.set()


@pytest.mark.parametrize("method", ["finish", pytest.param("has_same", marks=pytest.mark.nightly)])
def test_a_rank_that_does_not_answer_an_update_in_time_ends_the_engine(method: str, tied: Path) -> None:
    weights = weights_of(tied, 1.25)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied, so that the ranks compare them
    with stalled(tied, method, 3.0) as (engine, _):
        before = engine.generate(PROMPTS, PARAMS)
        engine.update_weights(weights)
        assert_same(engine.generate(PROMPTS, PARAMS), before)  # steps need no answer to the update
        with pytest.raises(EngineDead, match=r"^rank 0 of 2 lost another rank: [^\n]+$"):
            engine.finish_update()
        assert not engine.is_alive
        with pytest.raises(EngineDead, match="rank 0 of 2 lost another rank"):
            engine.generate(PROMPTS, PARAMS)


def test_the_timeout_of_an_update_leaves_every_rank_on_the_old_weights(tiny: Path) -> None:
    with stalled(tiny, "finish", 60.0) as (engine, stall):
        before, checksum = engine.generate(PROMPTS, PARAMS), engine.weights_checksum()
        engine.update_weights(weights_of(tiny, 1.25), timeout=0.5)
        with pytest.raises(WeightError, match=r"the weights were not complete within 0\.5 seconds"):
            engine.finish_update()
        assert_same(engine.generate(PROMPTS, PARAMS), before)
        stall.may_go.set()
        assert engine.weights_checksum() == checksum
        engine.update_weights(weights_of(tiny, 1.25), blocking=True)
        assert engine.weights_checksum() != checksum and engine.get_weight_version() == 1


def test_an_engine_whose_rank_does_not_answer_an_update_can_be_shut_down(tiny: Path) -> None:
    """Without the wait of two minutes for the answer."""
    with stalled(tiny, "finish", 120.0) as (engine, stall):
        engine.update_weights(weights_of(tiny, 1.25))
        assert stall.is_reached.wait(60)
        ending = threading.Thread(target=engine.shutdown, daemon=True)
        ending.start()
        ending.join(60)
        assert not ending.is_alive()


def stopped(path: Path) -> InferenceEngine:
    """Return an engine whose rank 1 is stopped after its first answer."""
    before = ranks_of(os.getpid())
    engine = InferenceEngine(config(path, 2))
    engine.generate(PROMPTS, PARAMS)
    (rank,) = set(ranks_of(os.getpid())).difference(before)
    os.kill(rank, signal.SIGSTOP)
    return engine


@pytest.mark.nightly
def test_engines_whose_ranks_hang_can_be_shut_down(tiny: Path) -> None:
    """One waits for an answer to its question, one sends an update; both wait for their ranks at the same time."""
    asking, stopped_at = stopped(tiny), time.monotonic()
    updating = stopped(tiny)
    updating.update_weights(weights_of(tiny, 1.25))
    endings = [threading.Thread(target=one.shutdown, daemon=True) for one in (updating, asking)]
    endings[0].start()
    time.sleep(max(0.0, stopped_at + 2 - time.monotonic()))  # rank 0 waits for an answer to its question
    endings[1].start()
    for ending in endings:
        ending.join(60)
        assert not ending.is_alive()
    assert not ranks_of(os.getpid())
