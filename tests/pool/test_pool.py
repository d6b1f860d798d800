"""A pool of two engines in this process equals one engine, bit for bit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_inference import (
    BadRequest,
    EngineDead,
    InferenceEngine,
    ModelError,
    RolloutPool,
    SamplingParams,
    UpdateBusy,
    WeightError,
    save_weights,
)
from nano_inference.rl.pool.local import LocalFleet, LocalWorker
from nano_inference.rl.pool.pool import PoolStream
from nano_inference.types import Delta
from nano_inference.weights.updates import WeightUpdate
from tests.pool.engines import LONG, PARAMS, PROMPTS, SEED, Engines, config_of, facts, transient
from tests.weights.pairs import Pair
from tests.weights.test_update import failing


@pytest.fixture
def engines(untied: Pair) -> Engines:
    return Engines(untied)


@pytest.fixture
def pool(engines: Engines) -> Iterator[RolloutPool]:
    with RolloutPool(engines.fleet(), seed=SEED) as one:
        yield one


@pytest.fixture
def single(untied: Pair) -> Iterator[InferenceEngine]:
    with InferenceEngine(config_of(untied)) as engine:
        yield engine


def test_samples_equal_one_engine(pool: RolloutPool, single: InferenceEngine) -> None:
    for num_samples in (1, 3):
        assert facts(pool.generate(PROMPTS, PARAMS, num_samples)) == facts(
            single.generate(PROMPTS, PARAMS, num_samples)
        )
    own = [SamplingParams(max_tokens=5 + n, temperature=0.5 * (n % 3), seed=n, logprobs=2) for n in range(8)]
    mine, expected = pool.generate(PROMPTS, own), single.generate(PROMPTS, own)
    assert facts(mine) == facts(expected) and [s.top_logprobs for s in mine] == [s.top_logprobs for s in expected]
    assert all(one.num_computed for one in pool.facts().values())
    assert {sample.lineage for sample in mine} == {pool.lineage}


def test_scores_embeddings_and_streams_equal_one_engine(pool: RolloutPool, single: InferenceEngine) -> None:
    assert pool.score(PROMPTS) == single.score(PROMPTS)
    assert pool.score(PROMPTS[0], 3, temperature=0.7) == single.score(PROMPTS[0], 3, temperature=0.7)
    assert pool.embed(PROMPTS[:3], "last", normalize=True) == single.embed(PROMPTS[:3], "last", normalize=True)
    mine, expected = list(pool.stream(PROMPTS[0], PARAMS, 2)), list(single.stream(PROMPTS[0], PARAMS, 2))
    for index in (0, 1):
        both = [[d for d in deltas if d.sample_index == index] for deltas in (mine, expected)]
        assert [t for d in both[0] for t in d.token_ids] == [t for d in both[1] for t in d.token_ids]
        assert [v for d in both[0] for v in d.logprobs] == [v for d in both[1] for v in d.logprobs]
        assert facts([both[0][-1].sample]) == facts([both[1][-1].sample])  # type: ignore[list-item]
    assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))


def test_samples_of_a_prompt_prefill_it_once_in_the_whole_pool(pool: RolloutPool) -> None:
    prompt = list(range(1, 101))
    samples = pool.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), 6)
    computed = sorted(one.num_computed for one in pool.facts().values())
    assert len(samples) == 6
    assert computed[0] == 0 and computed[1] == 100 + 6 * 3 + 5  # 5 siblings compute the prompt's last token again


def test_prompts_and_sessions_go_where_their_prefix_is_cached(pool: RolloutPool) -> None:
    prompts = [[n] * 40 for n in range(1, 8)]
    pool.generate(prompts, PARAMS)
    again = pool.generate([[*prompt, 9] for prompt in reversed(prompts)], PARAMS)
    assert all(sample.num_cached_tokens >= 32 for sample in again)
    pool.generate([[20, 21], [30, 31]], LONG, sessions=["a", "b"])
    longer = pool.generate([[30, 31, *range(40)], [20, 21, *range(40)]], PARAMS, sessions=["b", "a"])
    assert [sample.num_cached_tokens for sample in longer] == [2, 2]


def test_samples_equal_one_engine_through_updates(
    pool: RolloutPool, single: InferenceEngine, untied: Pair, tmp_path: Path
) -> None:
    old = facts(pool.generate(PROMPTS, PARAMS, 2))
    assert old == facts(single.generate(PROMPTS, PARAMS, 2))
    save_weights(untied.old.named_parameters(), tmp_path / "old")
    changed = {name: tensor.clone() for name, tensor in untied.named().items()}
    sources = [changed, tmp_path / "old", transient(untied.named())]
    for number, source in enumerate(sources, start=1):
        assert pool.update_weights(source, blocking=number == 2, version=f"step-{number}") == number
        for tensor in changed.values():  # the pool has a snapshot
            tensor.zero_()
        assert pool.finish_update() == pool.get_weight_version() == number
        assert pool.weight_info() == (number, f"step-{number}", "idle")
        weights = untied.named() if number != 2 else dict(untied.old.named_parameters())
        single.update_weights(weights, blocking=True, version=f"step-{number}")
        assert pool.weights_checksum() == single.weights_checksum()
        mine = pool.generate(PROMPTS, PARAMS, 2)
        assert facts(mine) == facts(single.generate(PROMPTS, PARAMS, 2))
        assert {sample.weight_version for sample in mine} == {number}


def paused_stream(pool: RolloutPool, engines: Engines) -> tuple[PoolStream, list[Delta]]:
    """Start a stream on worker 0, whose engine pauses itself after six tokens; return it and these."""
    engines.opened[0][-1].steps_to_pause = 6
    stream, deltas = pool.stream(PROMPTS[0], LONG), list[Delta]()
    while sum(len(delta.token_ids) for delta in deltas) < 6:
        deltas.append(next(stream))
    return stream, deltas


class OneSided(LocalFleet):
    """A fleet whose worker 1 rejects updates while it is broken."""

    is_broken = False

    async def open(self, index: int) -> LocalWorker:
        worker = await super().open(index)
        stage = worker.stage

        async def refuse(update: WeightUpdate) -> int:
            if self.is_broken and index == 1:
                raise WeightError("q_proj.weight: holds NaN or infinity")
            return await stage(update)

        worker.stage = refuse  # type: ignore[method-assign]
        return worker


def test_failure_of_one_worker_leaves_all_on_the_old_weights(
    engines: Engines, single: InferenceEngine, untied: Pair
) -> None:
    fleet = OneSided(engines.open, 2)
    with RolloutPool(fleet, seed=SEED) as pool:
        old = pool.weights_checksum()
        fleet.is_broken = True
        message = r"worker 1: q_proj\.weight: holds NaN or infinity; all workers keep version 0"
        with pytest.raises(WeightError, match=message):
            pool.update_weights(untied.named())
            pool.finish_update()
        assert pool.weights_checksum() == old and pool.weight_info() == (0, None, "idle")
        assert [one.version for one in pool.facts().values()] == [0, 0]
        assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
        fleet.is_broken = False
        assert pool.update_weights(untied.named(), blocking=True, version=7) == 1


def test_rejected_updates_change_nothing(pool: RolloutPool, untied: Pair) -> None:
    named = untied.named()
    name = next(iter(named))
    with pytest.raises(WeightError, match="lacks 1 tensors"):
        pool.update_weights({key: value for key, value in named.items() if key != name}, blocking=True)
    with pytest.raises(WeightError, match=rf"{name}: must be a tensor, got int"):
        pool.update_weights({**named, name: 3})  # type: ignore[dict-item]
    with pytest.raises(WeightError, match="the source of the weights failed: RuntimeError: the trainer died"):
        pool.update_weights(failing(named))
    with pytest.raises(WeightError, match="pass its state_dict"):
        pool.update_weights(untied.new)  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="no such directory"):
        pool.update_weights("/nothing/here", blocking=True)
    with pytest.raises(WeightError, match="checksum"):
        pool.update_weights(named, blocking=True, checksum="00")
    with pytest.raises(BadRequest, match="on_running"):
        pool.update_weights(named, on_running="never")  # type: ignore[arg-type]
    assert pool.get_weight_version() == 0
    assert pool.update_weights(named, blocking=True) == 1


def test_worker_that_dies_is_replaced_and_samples_stay_equal(
    pool: RolloutPool, engines: Engines, single: InferenceEngine, untied: Pair
) -> None:
    for one in (pool, single):
        one.update_weights(dict(untied.old.named_parameters()), blocking=True, version="a")
        one.update_weights(untied.named(), blocking=True, version="b")
    engines.opened[1][-1].steps_left = 5
    assert facts(pool.generate(PROMPTS, PARAMS, 2)) == facts(single.generate(PROMPTS, PARAMS, 2))
    assert pool.num_replaced == 1 and len(engines.opened[1]) == 2
    assert pool.weights_checksum() == single.weights_checksum()
    assert [one.version for one in pool.facts().values()] == [2, 1]  # the new worker got the weights in force only
    assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))


def test_update_that_a_dead_worker_misses_is_refused_and_the_worker_replaced(
    pool: RolloutPool, engines: Engines, untied: Pair
) -> None:
    engines.opened[1][-1].steps_left = 0
    with pytest.raises(WeightError, match=r"worker 1: .*; all workers keep version 0"):
        pool.update_weights(untied.named(), blocking=True)
    assert pool.num_replaced == 1
    stream, _ = paused_stream(pool, engines)
    assert pool.update_weights(untied.named(), version="new") == 1  # while a request runs
    assert pool.finish_update() == 1 and [one.version for one in pool.facts().values()] == [1, 1]
    pool.resume()
    sample = [delta.sample for delta in stream][-1]
    assert sample is not None and sample.token_versions[0] == 0 and sample.token_versions[-1] == 1
    assert sample.version_labels == {1: "new"}


def kill_busy(pool: RolloutPool, engines: Engines) -> None:
    """Kill the worker that has paused, at its next step but one."""
    engines.opened[0][-1].steps_left = 2
    pool.resume()


def test_stream_continues_on_another_worker(pool: RolloutPool, engines: Engines, single: InferenceEngine) -> None:
    expected = list(single.stream(PROMPTS[0], LONG))
    stream, deltas = paused_stream(pool, engines)
    kill_busy(pool, engines)
    deltas += stream
    assert [t for d in deltas for t in d.token_ids] == [t for d in expected for t in d.token_ids]
    assert [v for d in deltas for v in d.logprobs] == [v for d in expected for v in d.logprobs]
    assert facts([deltas[-1].sample]) == facts([expected[-1].sample])  # type: ignore[list-item]
    assert pool.num_replaced == 1


def test_stream_ends_with_an_error_if_the_weights_changed_before_the_death(
    pool: RolloutPool, engines: Engines, untied: Pair
) -> None:
    stream, _ = paused_stream(pool, engines)
    pool.update_weights(untied.named(), blocking=True)
    kill_busy(pool, engines)
    with pytest.raises(EngineDead, match="its worker died and the weights have changed since"):
        list(stream)
    assert pool.num_replaced == 1


def test_abort_returns_unfinished_samples_and_later_ones_stay_equal(
    pool: RolloutPool, single: InferenceEngine, engines: Engines
) -> None:
    expected = single.generate(PROMPTS[:2], LONG)
    with ThreadPoolExecutor(1) as threads:
        stream, deltas = paused_stream(pool, engines)
        waiting = threads.submit(lambda: pool.generate(PROMPTS[1:2], LONG))
        pool.abort([deltas[0].request_id, 99])
        pool.resume()
        deltas += stream
        cut = deltas[-1].sample
        assert cut is not None and cut.finish_reason == "abort" and len(cut.completion_tokens) < 600
        assert cut.completion_tokens == expected[0].completion_tokens[: len(cut.completion_tokens)] != ()
        assert facts(waiting.result(60)) == facts(expected[1:])
    assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))


def test_paused_pool_keeps_requests_until_resumed(pool: RolloutPool, single: InferenceEngine, engines: Engines) -> None:
    pool.pause("keep")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: pool.generate(PROMPTS, PARAMS))
        engines.opened[0][-1].steps_left = 0
        while not pool.num_replaced:
            pool.facts()
        computed = [sum(one.num_computed for one in pool.facts().values()) for _ in range(5)]
        pool.resume()
        assert computed == [0] * 5  # the new worker was paused too
        assert facts(waiting.result(60)) == facts(single.generate(PROMPTS, PARAMS))
    pool.pause("wait")
    pool.resume()
    assert pool.flush_cache() > 0


def test_invalid_requests_raise_before_anything_runs(pool: RolloutPool) -> None:
    with pytest.raises(BadRequest, match="token id 999 at position 1 is outside the vocabulary"):
        pool.generate([PROMPTS[0], [1, 999]], PARAMS)
    with pytest.raises(BadRequest, match="sessions: 1 given for 8 prompts"):
        pool.generate(PROMPTS, PARAMS, sessions=["a"])
    with pytest.raises(BadRequest, match="mode must be one of keep, wait, abort, got 'stop'"):
        pool.pause("stop")  # type: ignore[arg-type]
    assert sum(one.num_computed for one in pool.facts().values()) == 0
    assert pool.generate(PROMPTS[:1], PARAMS)[0].request_id == 0


def test_pool_that_cannot_replace_its_workers_ends(engines: Engines) -> None:
    def open_once(index: int) -> InferenceEngine:
        if index in engines.opened:
            raise ModelError("the machine is gone")
        return engines.open(index)

    with RolloutPool(LocalFleet(open_once, 2), seed=SEED) as pool:
        engines.opened[1][-1].steps_left = 2
        expected = facts(pool.generate(PROMPTS, PARAMS))
        assert len(expected) == 8 and list(pool.facts()) == ["worker 0"]
        engines.opened[0][-1].steps_left = 0
        with pytest.raises(EngineDead, match="the pool has no worker left"):
            pool.generate(PROMPTS, PARAMS)


def test_a_place_that_could_not_be_filled_is_tried_again(
    engines: Engines, single: InferenceEngine, untied: Pair
) -> None:
    failures = iter([ModelError("no memory now")] * 2)

    def open_engine(index: int) -> InferenceEngine:
        if index in engines.opened and (failure := next(failures, None)) is not None:
            raise failure
        engine = engines.open(index)
        if len(engines.opened[index]) > 1:
            engine.pause("keep")  # as a server that was paused before it came back
        return engine

    fleet = LocalFleet(open_engine, 2)
    fleet.retry_s = 0.05
    with RolloutPool(fleet, seed=SEED) as pool:
        for one in (pool, single):
            one.update_weights(untied.named(), blocking=True, version="b")
        engines.opened[1][-1].steps_left = 0
        assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
        while len(pool.facts()) < 2:
            time.sleep(0.01)
        assert pool.weights_checksum() == single.weights_checksum()
        assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
        assert all(one.num_computed for one in pool.facts().values())


def test_requests_wait_while_the_only_worker_is_replaced(engines: Engines, single: InferenceEngine) -> None:
    opening, may_open = threading.Event(), threading.Event()

    def open_slowly(index: int) -> InferenceEngine:
        if engines.opened:
            opening.set()
            assert may_open.wait(60)
        return engines.open(index)

    with RolloutPool(LocalFleet(open_slowly, 1), seed=SEED) as pool, ThreadPoolExecutor(2) as threads:
        engines.opened[0][-1].steps_left = 2
        first = threads.submit(lambda: pool.generate(PROMPTS[:4], PARAMS))
        assert opening.wait(60)
        second = threads.submit(lambda: pool.generate(PROMPTS[4:], PARAMS))
        may_open.set()
        assert facts(first.result(60)) + facts(second.result(60)) == facts(single.generate(PROMPTS, PARAMS))


def test_shut_down_pool_refuses_calls_and_failed_opening_leaves_no_thread(engines: Engines) -> None:
    pool = RolloutPool(engines.fleet(1), seed=SEED)
    pool.shutdown()
    pool.shutdown()
    with pytest.raises(EngineDead, match="the pool was shut down"):
        pool.generate(PROMPTS, PARAMS)

    def fail(index: int) -> InferenceEngine:
        raise RuntimeError(f"no memory for engine {index}")

    with pytest.raises(RuntimeError, match="no memory for engine 0"):
        RolloutPool(LocalFleet(fail, 2))
    assert not any(one.name == "pool" for one in threading.enumerate())


def test_second_update_is_refused_while_one_is_gathered_and_the_first_can_be_cancelled(
    engines: Engines, untied: Pair
) -> None:
    class Waiting(LocalFleet):
        """Workers that gather no update."""

        async def open(self, index: int) -> LocalWorker:
            worker = await super().open(index)
            worker.stage = wait_forever  # type: ignore[method-assign]
            return worker

    async def wait_forever(update: WeightUpdate) -> int:
        return int(await asyncio.Event().wait())

    with RolloutPool(Waiting(engines.open, 2), seed=SEED) as pool:
        assert pool.update_weights(untied.named()) == 1
        with pytest.raises(UpdateBusy, match="an update of the pool is in progress"):
            pool.update_weights(untied.named())
        with pytest.raises(TimeoutError, match="still being gathered"):
            pool.finish_update(timeout=0.01)
        assert pool.weight_info().update == "staging" and pool.cancel_update() and not pool.cancel_update()
        assert pool.weight_info() == (0, None, "idle")
