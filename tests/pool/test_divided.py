"""A pool whose engines are divided among two processes each."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from nano_inference import InferenceEngine, RolloutPool, SamplingParams
from nano_inference.rl.pool.local import LocalFleet
from tests.engine.test_batch_invariance import ThreadsKept
from tests.parallel.test_engine import assert_same, config_of
from tests.parallel.test_processes import SOON_S, ranks_of, wait_until
from tests.pool.engines import PROMPTS, SEED
from tests.weights.pairs import Pair

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.mark.slow
def test_pool_of_divided_engines_equals_one_engine_through_an_update_and_a_lost_rank(untied: Pair) -> None:
    directory, me = untied.directory, os.getpid()

    def open_engine(index: int) -> InferenceEngine:
        return InferenceEngine(config_of(directory, tensor_parallel=2))

    with (
        ThreadsKept(),
        InferenceEngine(config_of(directory)) as single,
        RolloutPool(LocalFleet(open_engine, 2), seed=SEED) as pool,
    ):
        assert_same(pool.generate(PROMPTS, PARAMS, 2), single.generate(PROMPTS, PARAMS, 2))
        for one in (pool, single):
            one.update_weights(untied.named(), blocking=True, version="new")
        assert pool.weights_checksum() == single.weights_checksum()
        assert_same(pool.generate(PROMPTS, PARAMS), single.generate(PROMPTS, PARAMS))
        before = [one.num_sampled for one in pool.facts().values()]
        assert min(before) > 0 and len(ranks_of(me)) == 2
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lambda: pool.generate(PROMPTS, LONG))
            while pool.facts()["worker 1"].num_sampled == before[1]:
                assert not waiting.done()
            os.kill(min(ranks_of(me)), signal.SIGKILL)
            samples = waiting.result(120)
        assert_same(samples, single.generate(PROMPTS, LONG))
        assert pool.num_replaced == 1 and pool.weights_checksum() == single.weights_checksum()
        assert len(ranks_of(me)) == 2
    wait_until(lambda: not ranks_of(me), SOON_S)
