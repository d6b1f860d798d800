"""A pool of two Ray actors equals one engine, bit for bit: through updates, one-sided failures and killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_inference import (
    BadRequest,
    EngineConfig,
    InferenceEngine,
    RayFleet,
    RolloutPool,
    SamplingParams,
    WeightError,
    save_weights,
)
from nano_inference.support.packages import MissingPackage
from tests.pool.engines import PARAMS, PROMPTS, SEED, config_of, facts, transient
from tests.weights.pairs import Pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(cluster: str, untied: Pair) -> Iterator[RolloutPool]:
    with RolloutPool(RayFleet(config_of(untied), 2), seed=SEED) as one:
        yield one


@pytest.fixture(scope="module")
def single(untied: Pair) -> Iterator[InferenceEngine]:
    with InferenceEngine(config_of(untied)) as engine:
        yield engine


@pytest.mark.nightly
def test_a_fleet_joins_no_cluster_that_is_not_named(cluster: str) -> None:
    """Also not the one that `ray start` notes in Ray's directory of temporary files."""
    import ray

    here = ray.get_runtime_context().gcs_address

    def joined(address: str, directory: str) -> str:
        (Path(directory) / "ray").mkdir()
        (Path(directory) / "ray" / "ray_current_cluster").write_text(here)
        code = (
            "import ray; from nano_inference import EngineConfig, RayFleet; "
            "RayFleet(EngineConfig(model_path='m'), 1); print(ray.get_runtime_context().gcs_address); ray.shutdown()"
        )
        environment = {**os.environ, "RAY_ADDRESS": address, "RAY_TMPDIR": directory}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        return ended.stdout.split()[-1]

    for address in ("", here):
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
            assert (joined(address, directory) == here) == (address == here)


def test_actors_equal_one_engine_through_an_update(
    pool: RolloutPool, single: InferenceEngine, untied: Pair, tmp_path: Path
) -> None:
    assert facts(pool.generate(PROMPTS, PARAMS, 2)) == facts(single.generate(PROMPTS, PARAMS, 2))
    assert pool.score(PROMPTS[:2]) == single.score(PROMPTS[:2])
    mine = [token for delta in pool.stream(PROMPTS[0], PARAMS) for token in delta.token_ids]
    assert mine == [token for delta in single.stream(PROMPTS[0], PARAMS) for token in delta.token_ids]
    directory = save_weights(untied.old.named_parameters(), tmp_path / "old")
    named = {name: tensor.bfloat16() if tensor.dim() == 2 else tensor for name, tensor in untied.named().items()}
    for number, weights in enumerate((named, directory, None), start=1):
        for one in (pool, single):
            given = transient(untied.named()) if weights is None else weights
            assert one.update_weights(given, blocking=True, version=f"step-{number}") == number
        assert pool.weights_checksum() == single.weights_checksum()
        assert facts(pool.generate(PROMPTS, PARAMS, 2)) == facts(single.generate(PROMPTS, PARAMS, 2))


def test_abort_and_pause_reach_the_actors(pool: RolloutPool, single: InferenceEngine) -> None:
    params = SamplingParams(max_tokens=700, ignore_eos=True)
    stream, (whole,) = pool.stream(PROMPTS[0], params), single.generate(PROMPTS[:1], params)
    first = next(stream)
    pool.pause("keep")
    pool.abort(first.request_id)
    pool.resume()
    cut = [delta.sample for delta in stream][-1]
    assert cut is not None and cut.finish_reason == "abort" and 0 < len(cut.completion_tokens) < 700
    assert cut.completion_tokens == whole.completion_tokens[: len(cut.completion_tokens)]
    assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))


def test_update_that_one_actor_does_not_survive_leaves_both_on_the_old_weights(
    pool: RolloutPool, single: InferenceEngine, untied: Pair
) -> None:
    version, checksum = pool.get_weight_version(), pool.weights_checksum()
    old = dict(untied.old.named_parameters())
    with pytest.raises(WeightError, match=r"worker 0: the update lacks 1 tensors: .*; all workers keep version"):
        pool.update_weights(dict(list(old.items())[1:]), blocking=True)
    os.kill(pool.facts()["worker 1"].pid, signal.SIGKILL)
    with pytest.raises(WeightError, match=rf"worker 1: the actor died .*; all workers keep version {version}"):
        pool.update_weights(old, blocking=True)
    assert pool.get_weight_version() == version and pool.weights_checksum() == checksum
    assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
    with pytest.raises(BadRequest, match="outside the vocabulary"):
        pool.generate([[1, 999]])


def test_actor_killed_in_mid_generation_changes_no_token(
    pool: RolloutPool, single: InferenceEngine, untied: Pair
) -> None:
    for one in (pool, single):
        one.update_weights(untied.named(), blocking=True, version="last")
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    before = pool.facts()["worker 1"]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: pool.generate(PROMPTS, params, 2))
        while pool.facts()["worker 1"].num_sampled == before.num_sampled:
            assert not waiting.done()
        os.kill(before.pid, signal.SIGKILL)
        samples = waiting.result(120)
    assert facts(samples) == facts(single.generate(PROMPTS, params, 2))
    after = pool.facts()["worker 1"]
    assert pool.num_replaced == 2 and after.pid != before.pid and after.version == 1
    assert pool.weights_checksum() == single.weights_checksum()


def test_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # an import then raises ModuleNotFoundError
    with pytest.raises(MissingPackage) as caught:
        RayFleet(EngineConfig(model_path="m"), 2)
    assert str(caught.value) == "a pool of Ray actors needs Ray: pip install 'nano-inference[ray]'"
