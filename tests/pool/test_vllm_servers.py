"""Servers that have vLLM's routes alone, in a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nano_inference import BadRequest, EngineConfig, InferenceEngine, RolloutPool, SamplingParams, UrlFleet, WeightError
from tests.pool.engines import PARAMS, PROMPTS, SEED, config_of, facts
from tests.pool.vllm_stub import Stub, vllm_stub
from tests.server.tiny import make_tiny
from tests.server.trainer import serving
from tests.weights.pairs import Pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stubs(untied: Pair) -> Iterator[list[Stub]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(InferenceEngine(config_of(untied))) for _ in range(2)]
        yield [stack.enter_context(vllm_stub(engine)) for engine in engines]


@pytest.fixture
def pool(stubs: list[Stub]) -> Iterator[RolloutPool]:
    for stub in stubs:
        stub.asked.clear()
    with RolloutPool(UrlFleet([stub.url for stub in stubs]), seed=SEED) as one:
        yield one


def test_samples_and_streams_equal_one_engine(pool: RolloutPool, stubs: list[Stub], untied: Pair) -> None:
    with InferenceEngine(config_of(untied)) as single:
        for params in (PARAMS, SamplingParams(max_tokens=6, temperature=0.6, top_k=9, min_p=0.01, logprobs=2)):
            mine, right = pool.generate(PROMPTS, params, 2), single.generate(PROMPTS, params, 2)
            assert facts(mine) == facts(right) and [s.top_logprobs for s in mine] == [s.top_logprobs for s in right]
        assert pool.score(PROMPTS, 4) == single.score(PROMPTS, 4)
        streams = [list(one.stream(PROMPTS[0], PARAMS)) for one in (pool, single)]
    tokens = [[token for delta in stream for token in delta.token_ids] for stream in streams]
    assert tokens[0] == tokens[1] and len(streams[0]) == PARAMS.max_tokens
    assert facts([streams[0][-1].sample]) == facts([streams[1][-1].sample])  # type: ignore[list-item]
    assert all(stub.asked for stub in stubs) and len(pool.facts()) == 2


def test_commands_of_our_server_are_refused_by_name(pool: RolloutPool, stubs: list[Stub], tmp_path: Path) -> None:
    needs = "updates, pauses and aborts need nano-inference's server with --enable-rl"
    with pytest.raises(WeightError) as refused:
        pool.update_weights(tmp_path, blocking=True)
    url = stubs[0].url
    assert str(refused.value) == f"{url}: has no POST /update_weights; {needs}; all workers keep version 0"
    with pytest.raises(BadRequest) as paused:
        pool.pause("keep")
    assert str(paused.value) in [f"{stub.url}: has no POST /pause; {needs}" for stub in stubs]
    for command in (pool.flush_cache, pool.weights_checksum):
        with pytest.raises(BadRequest, match=needs):
            command()
    assert len(pool.facts()) == 2 and pool.num_replaced == 0


def test_a_refused_pause_pauses_no_other_server(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path)
    options = EngineConfig(model_path=str(directory), device="cpu", num_threads=1, kv_cache_bytes=8 << 20)
    with ExitStack() as stack:
        stub = stack.enter_context(vllm_stub(stack.enter_context(InferenceEngine(options))))
        ours = stack.enter_context(serving(directory, logprobs_mode="processed"))
        pool = stack.enter_context(RolloutPool(UrlFleet([ours.url, stub.url]), seed=SEED))
        with pytest.raises(BadRequest, match=f"{stub.url}: has no POST /pause"):
            pool.pause("keep")
        assert len(pool.generate(PROMPTS, PARAMS)) == 8
        assert ours.link.last_stats is not None and stub.asked[-1][0] == "/inference/v1/generate"
