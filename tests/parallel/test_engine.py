"""Engines that are divided among ranks against undivided ones."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.types import EnginePaused
from tests.engine.test_lookahead import REQUESTS, run_all
from tests.loading import tiny_models
from tests.models.families import FAMILIES, KINDS, make_model
from tests.models.hybrids import HYBRIDS, make_hybrid
from tests.nanochat.tiny import GENERATIONS, base_meta, write_checkpoint
from tests.parallel.ranks import open_ranks

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5


def config_of(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(path), device="cpu", num_threads=1, seed=5, kernels="off",
        **{"kv_cache_bytes": 16 << 20, "max_model_len": 512, "max_batch_size": 8, **options},
    )  # fmt: skip


def write_model(name: str, directory: Path) -> None:
    if name in FAMILIES:
        make_model(name, directory)
    elif name in HYBRIDS:
        make_hybrid(name, directory)
    else:
        write_checkpoint(directory, name, meta=base_meta(name))


def numbers(sample: TrainingSample) -> list[float]:
    """Return all numbers that a sample reports."""
    tops = [one.logprob for top in sample.top_logprobs or () for one in top or ()]
    known = [value for value in sample.prompt_logprobs or () if value is not None]
    raw = [value for value in sample.raw_logprobs or () if value is not None]
    return [*sample.logprobs, *known, *raw, *tops]


def facts(sample: TrainingSample) -> tuple[Any, ...]:
    """Return everything else that must be equal."""
    tops = [[one.token for one in top or ()] for top in sample.top_logprobs or ()]
    masks = sample.sampling_masks
    return (sample.completion_tokens, sample.mask, sample.finish_reason, sample.stop_reason, tops, masks)


def assert_same(mine: list[TrainingSample], right: list[TrainingSample]) -> None:
    assert [facts(one) for one in mine] == [facts(one) for one in right]
    for one, other in zip(mine, right, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=TOLERANCE)


UNDIVIDED = {
    *(("llama3-rope-ratio3-tied", 4), ("qwen3-ratio3-tied", 4), ("mistral-window", 4)),
    *(("qwen2-ratio7", 2), ("qwen2-ratio7", 4)),
}
IN_FOUR = ("llama-ratio1-untied", "llama-linear-rope-biases", "gemma2", "G4")
"""Families with 4, 2 and 1 key-value heads, with biases, and with norms behind blocks."""


def divisions() -> list[Any]:
    """Return pairs of a family and a number of ranks; a step of four ranks takes four times as long as of two."""
    common = {*((name, 2) for name in KINDS), *((name, 4) for name in IN_FOUR)}
    every = [(name, size) for name in (*FAMILIES, *GENERATIONS) for size in (2, 4) if (name, size) not in UNDIVIDED]
    return [one if one in common else pytest.param(*one, marks=pytest.mark.nightly) for one in every]


RECURRENT = (("wide-values", 2), ("equal-heads-tied", 4), ("grouped", 2))


@pytest.mark.parametrize(("name", "size"), [*divisions(), *RECURRENT])
def test_every_family_is_the_undivided_one(name: str, size: int, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    with InferenceEngine(config_of(tmp_path)) as whole:
        vocab_size, longest = whole.parts.vocab_size, whole.parts.max_model_len - 40
        rng = random.Random(2)
        prompts = [[rng.randrange(vocab_size) for _ in range(count)] for count in (1, 2, 17, min(150, longest))]
        params = [SamplingParams(max_tokens=5, seed=i, temperature=float(i % 3 > 0), logprobs=2) for i in range(4)]
        right, scores = whole.generate(prompts, params), whole.score(prompts[2:])
        embedded, checksum = whole.embed(prompts[3]), whole.weights_checksum()
    with open_ranks(config_of(tmp_path, tensor_parallel=size)) as engine:
        assert_same(engine.generate(prompts, params), right)
        for one, other in zip(engine.score(prompts[2:]), scores, strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE)
        assert engine.embed(prompts[3]) == pytest.approx(embedded, abs=TOLERANCE)
        assert engine.weights_checksum() == checksum
        (tmp_path / "STABLE").touch()
        for weights in (str(tmp_path), dict(engine.parts.executor.weights.values())) if name in HYBRIDS else ():
            engine.update_weights(weights, blocking=True)
            assert engine.weights_checksum() == checksum
        assert_same(engine.generate(prompts, params), right)


def test_a_column_cut_inside_the_blocks_of_a_gguf_file_is_the_undivided_one(tmp_path: Path) -> None:
    """Two ranks cut 96 columns at 48 and 32 at 16; a block has 32 values."""
    model = tiny_models.make_model("llama", intermediate_size=96, num_hidden_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.2
    path = tiny_models.write_gguf(tmp_path / "m.gguf", "llama", model, kind=GGMLQuantizationType.Q8_0)
    prompts, params = [[1, 2, 3], [9] * 20], SamplingParams(max_tokens=20, seed=3, logprobs=2, ignore_eos=True)
    config = config_of(path, max_model_len=128)
    with InferenceEngine(config) as whole:
        right, checksum = whole.generate(prompts, params), whole.weights_checksum()
    with open_ranks(replace(config, tensor_parallel=2)) as engine:
        assert engine.weights_checksum() == checksum
        assert_same(engine.generate(prompts, params), right)


def shorter(params: SamplingParams) -> SamplingParams:
    """At most 16 tokens: the ranks exchange dozens of messages for each."""
    assert params.max_tokens is not None
    return replace(params, max_tokens=min(params.max_tokens, 16))


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_batch": 32},
        {"lookahead": 5, "logprobs_mode": "tempered"},
        {"speculation": "ngram", "logprobs_mode": "raw"},
        {"kv_cache_bytes": 96 << 10, "cache_type": "paged"},
    ],
    ids=["chunks", "lookahead", "speculation", "preemption"],
)
def test_every_kind_of_request_is_the_undivided_one(options: dict[str, Any], tiny: Path) -> None:
    requests = [
        replace(one, num_samples=min(one.num_samples, 1 + (i < 3)), params=shorter(one.params))
        for i, one in enumerate(REQUESTS)
    ]
    with InferenceEngine(config_of(tiny, **options | {"kv_cache_bytes": 16 << 20})) as whole:
        right, _ = run_all(whole, requests)
    with open_ranks(config_of(tiny, tensor_parallel=2, **options)) as engine:
        mine, stats = run_all(engine, requests)
    assert any(one.num_preempted for one in stats) == ("cache_type" in options)
    assert len(requests) > 20
    assert_same(mine, right)


def test_unseeded_requests_end_on_all_ranks(tiny: Path) -> None:
    with open_ranks(replace(config_of(tiny, tensor_parallel=2), seed=None)) as engine:
        first, second = (engine.generate([[5, 6, 7]], SamplingParams(max_tokens=15, ignore_eos=True)) for _ in "ab")
        assert first[0].completion_tokens != second[0].completion_tokens
        assert engine.score([*first[0].prompt_tokens, *first[0].completion_tokens], 3) == pytest.approx(
            first[0].logprobs, abs=TOLERANCE
        )


def test_abort_and_pause_leave_the_ranks_in_step(tiny: Path) -> None:
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    with InferenceEngine(config_of(tiny)) as whole:
        right = whole.generate([[1, 2, 3]], params, 2)
    with open_ranks(config_of(tiny, tensor_parallel=2)) as engine:
        kept = engine.add_request([1, 2, 3], params, 2, claim=True)
        dropped = engine.add_request([7] * 40, params, 3, claim=True)
        for _ in range(9):
            engine.tick()
        assert [one.finish_reason for one in engine.abort(dropped)] == ["abort"] * 3
        engine.pause()
        with pytest.raises(EnginePaused):
            engine.wait_for_any([kept])
        engine.sleep()
        engine.wake()
        engine.resume()
        engine.wait_for_any([kept])
        assert_same(engine.collect(kept), right)


def test_an_interrupt_leaves_the_ranks_in_step(tiny: Path) -> None:
    params = SamplingParams(max_tokens=50, seed=3, ignore_eos=True)
    with open_ranks(config_of(tiny, tensor_parallel=2)) as engine:
        right = engine.generate([[1, 2, 3]], params)
        for delay in (0.05, 0.12, 0.21):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    engine.generate([[1, 2, 3]], params)
            timer.join()
        assert_same(engine.generate([[1, 2, 3]], params), right)


def test_a_copy_is_divided_too(tiny: Path) -> None:
    params = SamplingParams(max_tokens=10, seed=3)
    with open_ranks(config_of(tiny, tensor_parallel=2)) as engine:
        right = engine.generate([[1, 2, 3]], params)
        with engine.copy() as copy:
            values = {name: value * 1.5 for name, value in engine.parts.executor.weights.values()}  # type: ignore[union-attr]
            copy.update_weights(values, blocking=True)
            assert copy.generate([[1, 2, 3]], params)[0].completion_tokens != right[0].completion_tokens
        assert_same(engine.generate([[1, 2, 3]], params), right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_precisions_agree_on_all_ranks(dtype: str, tiny: Path) -> None:
    """Sums of parts are rounded at other places, so that tokens may differ from the undivided engine's."""
    with open_ranks(config_of(tiny, tensor_parallel=2, dtype=dtype)) as engine:
        (sample,) = engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        text = [*sample.prompt_tokens, *sample.completion_tokens]
        assert engine.score(text, 4) == pytest.approx(sample.logprobs, abs=0.1)
        assert torch.isfinite(torch.tensor(sample.logprobs)).all()
