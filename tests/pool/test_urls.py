"""A pool of two servers equals one engine: samples, scores, streams; updates from directories; unreachable servers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nano_inference import (
    BadRequest,
    EngineConfig,
    InferenceEngine,
    RolloutPool,
    SamplingParams,
    UrlFleet,
    WeightError,
    weights_in,
)
from nano_inference.rl.pool.worker import WorkerDied
from nano_inference.server.config import ServerConfig
from tests.pool.engines import SEED, facts
from tests.server.tiny import Running, make_tiny, running
from tests.server.trainer import make_weights, serving

pytestmark = pytest.mark.slow

PROMPTS = [[3, 1, 4, 1, 5, 9, n] for n in range(8)]
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
RICH = SamplingParams(
    max_tokens=6, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
    frequency_penalty=0.1, logit_bias={7: 2.0}, min_tokens=3, stop_token_ids=(11, 12), logprobs=2, prompt_logprobs=1,
    raw_logprobs=True, sampling_mask=True, seed=9
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shelves(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of weights that each server may read, the second inside the first."""
    root = tmp_path_factory.mktemp("shelves")
    make_weights(directory, root / "common" / "good", 11)
    make_weights(directory, root / "common" / "other", 12)
    broken = load_file(make_weights(directory, root / "outer", 13) / "model.safetensors")
    save_file(broken, root / "outer" / "model.safetensors")
    return root, root / "common"


@pytest.fixture
def servers(directory: Path, shelves: tuple[Path, Path]) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving(directory, shelf, logprobs_mode="processed", max_logprobs=100))
            for shelf in shelves
        ]


@pytest.fixture
def pool(servers: list[Running]) -> Iterator[RolloutPool]:
    with RolloutPool(UrlFleet([one.url for one in servers]), seed=SEED) as one:
        yield one


@pytest.fixture(scope="module")
def config(directory: Path) -> EngineConfig:
    return EngineConfig(model_path=str(directory), device="cpu", num_threads=1, kv_cache_bytes=8 << 20, seed=SEED)


def test_servers_equal_one_engine_through_an_update(
    pool: RolloutPool, servers: list[Running], config: EngineConfig, shelves: tuple[Path, Path]
) -> None:
    with InferenceEngine(config) as single:
        for label in (None, "step-1", 2):
            if label is not None:
                source = shelves[1] / ("good" if label == 2 else "other")
                assert pool.update_weights(source, blocking=True, version=label) == pool.get_weight_version()
                single.update_weights(weights_in(source, marker=None), blocking=True, version=label)
            assert facts(pool.generate(PROMPTS, PARAMS, 2)) == facts(single.generate(PROMPTS, PARAMS, 2))
        assert pool.weights_checksum() == single.weights_checksum()
        mine, expected = pool.generate(PROMPTS[:3], RICH), single.generate(PROMPTS[:3], RICH)
        assert facts(mine) == facts(expected)
        for name in ("top_logprobs", "raw_logprobs", "sampling_masks", "prompt_logprobs", "prompt_top_logprobs"):
            assert [getattr(s, name) for s in mine] == [getattr(s, name) for s in expected], name
        assert pool.score(PROMPTS, 3) == single.score(PROMPTS, 3)
        sampled = SamplingParams(temperature=0.7, top_k=9, frequency_penalty=0.5, min_tokens=2, max_tokens=8)
        assert pool.score(PROMPTS, 3, params=sampled) == single.score(PROMPTS, 3, params=sampled)
        assert pool.embed(PROMPTS[:2]) == single.embed(PROMPTS[:2])
        streams = [list(one.stream(PROMPTS[0], PARAMS)) for one in (pool, single)]
        assert facts([streams[0][-1].sample]) == facts([streams[1][-1].sample])  # type: ignore[list-item]
        tokens = [[token for delta in stream for token in delta.token_ids] for stream in streams]
        assert tokens[0] == tokens[1]
    assert all(one.link.last_stats is not None for one in servers)  # both had a part of the work


def test_update_that_one_server_rejects_leaves_both_on_the_old_weights(
    pool: RolloutPool, servers: list[Running], shelves: tuple[Path, Path]
) -> None:
    old = pool.weights_checksum()
    with pytest.raises(WeightError, match=rf"{servers[1].url}: .*; all workers keep version 0"):
        pool.update_weights(shelves[0] / "outer", blocking=True)  # only the first server may read it
    assert pool.weights_checksum() == old
    assert [one.version for one in pool.facts().values()] == [0, 0]
    with pytest.raises(WeightError, match="weights: workers at URLs read an update from a directory"):
        pool.update_weights(load_file(shelves[1] / "good" / "model.safetensors"))
    assert pool.update_weights(shelves[1] / "good", blocking=True) == 1


@pytest.mark.parametrize("is_noticed", [False, True], ids=["restarted", "away for a while"])
def test_a_server_that_comes_back_gets_the_weights_in_force(
    directory: Path, servers: list[Running], config: EngineConfig, shelves: tuple[Path, Path], is_noticed: bool
) -> None:
    good, shelf = shelves[1] / "good", shelves[1]
    with ExitStack() as stack:
        single, first = stack.enter_context(InferenceEngine(config)), stack.enter_context(ExitStack())
        leaving = first.enter_context(serving(directory, shelf, logprobs_mode="processed"))
        port = int(leaving.url.rpartition(":")[2])
        pool = stack.enter_context(RolloutPool(UrlFleet([servers[1].url, leaving.url], retry_s=0.05), seed=SEED))
        for one in (pool, single):
            source = good if one is pool else weights_in(good, marker=None)
            one.update_weights(source, blocking=True, version="a")
        first.close()
        if is_noticed:
            assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
            assert list(pool.facts()) == [servers[1].url]
        options = ServerConfig(
            port=port, log_requests=False, logprobs_mode="processed", enable_rl=True, weights_dir=str(shelf)
        )
        stack.enter_context(running(directory, options))
        assert facts(pool.generate(PROMPTS, PARAMS, 2)) == facts(single.generate(PROMPTS, PARAMS, 2))
        while len(pool.facts()) < 2:
            time.sleep(0.01)
        assert pool.weights_checksum() == single.weights_checksum()
        assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))
        other = shelves[1] / "other"
        assert pool.update_weights(other, blocking=True) == 2
        single.update_weights(weights_in(other, marker=None), blocking=True)
        assert facts(pool.generate(PROMPTS, PARAMS)) == facts(single.generate(PROMPTS, PARAMS))


def test_abort_and_pause_reach_the_servers(pool: RolloutPool) -> None:
    stream = pool.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    first = next(stream)
    pool.pause("keep")
    pool.abort(first.request_id)
    pool.resume()
    sample = [delta.sample for delta in stream][-1]
    assert sample is not None and sample.finish_reason == "abort" and sample.completion_tokens
    assert pool.flush_cache() >= 0


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["http://a:1", "http://a:1/v1/"], "urls: http://a:1 is given twice"),
        (["a:1"], "urls: 'a:1' is not the address of a server, such as http://host:8000"),
        (["http://u:p@a:1"], "urls: give the key of a as api_key, not in its address"),
        ([], "urls must be a list of at least one address"),
    ],
)
def test_invalid_addresses_are_one_line(urls: list[str], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        UrlFleet(urls)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_options_that_servers_do_not_take_are_refused_by_name(pool: RolloutPool) -> None:
    with socket.socket() as one:  # bound, and not listening
        one.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{one.getsockname()[1]}"
        with pytest.raises(WorkerDied, match=url):
            RolloutPool(UrlFleet([url]))
    with pytest.raises(BadRequest, match=r"temperature: workers at URLs score at temperature 1, got 0\.5"):
        pool.score(PROMPTS[0], temperature=0.5)
    with pytest.raises(BadRequest, match="logprobs_mode: servers set it for all requests"):
        pool.generate(PROMPTS[:1], SamplingParams(logprobs_mode="raw"))
    with pytest.raises(BadRequest, match="token id 999"):
        pool.generate([[999]], PARAMS)
    with pytest.raises(BadRequest, match="prompt"):
        pool.generate([[1, "x"]], PARAMS)  # type: ignore[list-item]
