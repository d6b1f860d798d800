"""Windows that the device computes while the host commits the one before give the bits of one token a step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.types import EngineRequest, OnRunning
from tests.cuda.engines import open_cuda
from tests.cuda.models import config_of, write_model
from tests.engine.test_lookahead import REQUESTS, ForceOne, MaskAfter, bare

TIGHT: dict[str, Any] = {"block_size": 4, "max_tokens_per_batch": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("overlap")
    write_model("llama3-rope-ratio3-tied", directory)
    return directory


def open_exact(path: Path, *, overlaps: bool = True, **options: Any) -> InferenceEngine:
    """Return an engine whose bits depend on nothing but the request."""
    engine = open_cuda(path, config_of(path, deterministic=True, **options))
    return engine if overlaps else InferenceEngine(engine.config, parts=replace(engine.parts, launch=None))


@pytest.fixture(scope="module")
def single(tiny: Path) -> Iterator[InferenceEngine]:
    with open_exact(tiny, overlaps=False, lookahead=1) as engine:
        yield engine


def run_all(
    engine: InferenceEngine, wanted: list[EngineRequest], seed: int | None = None, counted: Counter[str] | None = None
) -> list[TrainingSample]:
    """Run requests that arrive at once, or with a seed in the midst of windows; some are aborted and resumed."""
    rng = random.Random(seed)
    ids: list[int] = []
    num_preempted = 0
    while len(ids) < len(wanted) or engine.has_pending():
        while len(ids) < len(wanted) and (seed is None or rng.random() < 0.4):
            ids.append(engine.add(wanted[len(ids)], claim=True))
        num_preempted += engine.tick().stats.num_preempted
        engine.cache.check()
    if counted is not None:
        counted["preempted"] = num_preempted
    samples = [sample for one in ids for sample in engine.collect(one)]
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks
    engine.flush_cache()
    return [bare(sample) for sample in samples]


def is_free(request: EngineRequest) -> bool:
    """Whether the device can sample the next tokens of a request without the host."""
    params = request.params
    has_penalty = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
    is_hosted = request.make_matcher is not None or request.program is not None or params.sampling_mask
    return not (is_hosted or has_penalty or params.logprob_token_ids)


FREE = [one for one in REQUESTS if is_free(one)]


@pytest.mark.slow
def test_every_kind_of_request_has_the_bits_of_single_steps(tiny: Path, single: InferenceEngine) -> None:
    with open_exact(tiny, lookahead=3, max_batch_size=4) as engine:
        assert run_all(engine, REQUESTS, seed=1) == run_all(single, REQUESTS)
        assert min(engine.overlaps[one] for one in ("ahead", "choice", "arrival", "pass")) > 3, engine.overlaps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "seed"),
    [({}, None), ({"lookahead": 4, "max_batch_size": 32}, 1), (TIGHT | {"lookahead": 6}, 2), ({"lookahead": 1}, 3)],
    ids=["at once", "arriving", "preempted", "one token"],
)
def test_requests_that_need_no_host_have_the_bits_of_single_steps(
    tiny: Path, single: InferenceEngine, options: dict[str, Any], seed: int | None
) -> None:
    if "block_size" in options:
        options = options | {"kv_cache_bytes": 45 * single.model.cache.block_bytes(4)}
    counted: Counter[str] = Counter()
    with open_exact(tiny, **options) as engine:
        assert run_all(engine, FREE, seed, counted) == run_all(single, FREE)
        assert engine.overlaps["ahead"] > 3, engine.overlaps
    assert (counted["preempted"] > 0) == ("block_size" in options)


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("more", [{"make_matcher": MaskAfter}, {"program": ForceOne()}], ids=["mask", "program"])
def test_what_the_host_decides_ends_the_overlap(
    tiny: Path, single: InferenceEngine, lookahead: int, more: dict[str, Any]
) -> None:
    """The matcher has masks after some tokens only, which may be the last of a window."""
    wanted = [EngineRequest(prompt=[9, 3, i], params=replace(PLAIN, seed=i), **more) for i in range(3)]
    with open_exact(tiny, lookahead=lookahead) as engine:
        assert run_all(engine, wanted) == run_all(single, wanted)
        assert engine.overlaps["choice"] and ("program" in more or engine.overlaps["ahead"]), engine.overlaps


PLAIN = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, logprobs=1, raw_logprobs=True)


def test_rows_that_end_leave_fewer_slots_and_the_same_bits(tiny: Path, single: InferenceEngine) -> None:
    params = [replace(PLAIN, seed=i, max_tokens=9 + 8 * i) for i in range(9)]
    prompts = [[3, 4 + i] for i in range(9)]
    expected = single.generate(prompts, params)
    single.flush_cache()
    with open_exact(tiny, lookahead=4, max_batch_size=16) as engine:
        assert list(map(bare, engine.generate(prompts, params))) == list(map(bare, expected))
        assert engine.overlaps["ahead"] >= 16, engine.overlaps


@pytest.mark.parametrize("on_running", ["keep", "recompute", "abort", "wait"])
@pytest.mark.parametrize("blocking", [False, True])
def test_an_update_between_windows_in_flight(tiny: Path, on_running: OnRunning, blocking: bool) -> None:
    found = []
    for overlaps in (False, True):
        with open_exact(tiny, overlaps=overlaps, lookahead=4) as engine:
            weights = {name: value * 1.25 for name, value in engine.model.weights.values()}
            request = engine.add_request([5, 9, 30], PLAIN, 3, claim=True)
            for _ in range(4):
                engine.tick()
            engine.update_weights(weights, blocking=blocking, on_running=on_running)
            if not blocking:
                engine.finish_update()
            while engine.has_pending():
                engine.tick()
            found.append([bare(sample) for sample in engine.collect(request)])
            assert engine.overlaps.get("ahead", 0) > 2 or not overlaps
    assert found[0] == found[1]
