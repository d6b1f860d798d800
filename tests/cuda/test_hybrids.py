"""Models with recurrent states on the CUDA executor, on CPU tensors: Transformers, and equal bits in any steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference import InferenceEngine, TrainingSample
from nano_inference.types import EngineRequest
from tests.cuda.engines import open_cuda
from tests.cuda.models import config_of
from tests.cuda.strict import Strictly
from tests.cuda.test_steps import Cramped
from tests.engine.test_lookahead import run_all
from tests.models.families import gap_to, reference_logprobs
from tests.models.hybrids import HYBRIDS, make_hybrid
from tests.models.test_hybrids import PARAMS, TOLERANCE, text, worst

pytestmark = pytest.mark.slow

Witness = tuple[Path, transformers.PreTrainedModel]


DAILY = ("wide-values", "grouped")  # the last layer is linear; projections in one matrix


@pytest.fixture(
    scope="module",
    params=[*DAILY, *(pytest.param(one, marks=pytest.mark.nightly) for one in HYBRIDS if one not in DAILY)],
)
def witness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    directory = tmp_path_factory.mktemp("hybrid")
    yield directory, make_hybrid(request.param, directory)


def engine(directory: Path, **options: Any) -> InferenceEngine:
    return open_cuda(directory, config_of(directory, **{"kv_cache_bytes": 64 << 20, **options}))


def tight(directory: Path, **options: Any) -> tuple[InferenceEngine, int]:
    """Return an engine whose cache has blocks for less than two sequences of so many tokens, and states for two."""
    with engine(directory) as roomy:
        assert roomy.parts.executor is not None
        state_bytes, block_bytes = roomy.parts.executor.program.state_bytes, roomy.parts.executor.cache.block_bytes(16)
    num_blocks = max(14, -(-4 * state_bytes // block_bytes))
    return engine(directory, kv_cache_bytes=2 * num_blocks * block_bytes, **options), 10 * num_blocks


def bits(samples: list[TrainingSample]) -> list[Any]:
    return [(one.completion_tokens, one.logprobs) for one in samples]


@pytest.mark.parametrize("deterministic", [False, True])
def test_scores_and_hits_match_transformers(deterministic: bool, witness: Witness) -> None:
    directory, model = witness
    ids = text(1, 300)
    expected = reference_logprobs(model, ids)
    for budget, block_size in ((2048, 16), (37, 7), (100, 1)):
        options = {"max_tokens_per_batch": budget, "block_size": block_size, "deterministic": deterministic}
        with engine(directory, **options) as ours:
            assert ours.parts.code == "cuda"
            assert gap_to(expected, ids, ours.score(ids)) <= TOLERANCE, budget
            first, again = (ours.generate([text(2, 280)], PARAMS)[0] for _ in range(2))
            turn = [*again.prompt_tokens, *again.completion_tokens, *text(9, 30)]
            answer = ours.generate([turn], PARAMS)[0]
            assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 279)
            assert answer.num_cached_tokens == 280 + 23  # the last token's state was never computed
            assert worst(model, [first, again, answer]) <= TOLERANCE, budget


def test_preempted_samples_forks_updates_and_sleep_match_transformers(witness: Witness) -> None:
    directory, model = witness[0], copy.deepcopy(witness[1])
    prompts = [text(seed, 20 + 10 * seed) for seed in range(4)]
    short, length = tight(directory, max_tokens_per_batch=64)
    with short:
        samples = short.generate(prompts, replace(PARAMS, max_tokens=length - 50))
    assert sum(one.num_preemptions for one in samples)
    with engine(directory) as ours:
        group = ours.generate([text(5, 100)], PARAMS, num_samples=8)
        assert [one.num_cached_tokens for one in group] == [0] + [99] * 7
        assert worst(model, [*samples, *group]) <= TOLERANCE
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        ours.update_weights(model.state_dict(), blocking=True)
        updated = ours.generate([text(5, 100)], PARAMS)
        ours.sleep()
        ours.wake()
        woken = ours.generate([text(5, 100)], PARAMS)
        assert [one.num_cached_tokens for one in (*updated, *woken)] == [0, 0]
        assert worst(model, [*updated, *woken]) <= TOLERANCE


def test_deterministic_bits_do_not_depend_on_batch_chunks_hits_drafts_and_preemption(witness: Witness) -> None:
    directory, _ = witness
    prompts = [text(50 + i, 5) * (13 - 3 * i) for i in range(5)]
    params = replace(PARAMS, max_tokens=24, logit_bias={5: 30.0, 7: 30.0, 9: 30.0})
    with engine(directory, deterministic=True, lookahead=1) as ours:
        expected = []
        for prompt in prompts:
            expected += bits(ours.generate([prompt], params))
            ours.flush_cache()
    for options in ({"max_tokens_per_batch": 2048}, {"max_tokens_per_batch": 37, "block_size": 7, "lookahead": 3}):
        with engine(directory, deterministic=True, **options) as ours:
            for is_hit in (False, True):
                samples = ours.generate(prompts, params)
                assert all(one.num_cached_tokens > 0 for one in samples) == is_hit
                assert bits(samples) == expected, (options, is_hit)
    with engine(directory, deterministic=True, speculation="ngram") as drafting:
        drafted, stats = run_all(drafting, [EngineRequest(prompt=one, params=params) for one in prompts])
    assert bits(drafted) == expected
    assert 0 < sum(one.num_accepted for one in stats) < sum(one.num_drafted for one in stats)
    short, length = tight(directory, deterministic=True, max_tokens_per_batch=64)
    with short:
        samples = short.generate(prompts, replace(params, max_tokens=length - 65))
    assert sum(one.num_preemptions for one in samples)
    assert [(tokens[:24], logprobs[:24]) for tokens, logprobs in bits(samples)] == expected


def test_windows_only_launch_kernels_on_fixed_memory(witness: Witness) -> None:
    strictly = Strictly(witness[0], config_of(witness[0], kv_cache_bytes=64 << 20, lookahead=4))
    params = replace(PARAMS, max_tokens=9)
    with strictly.engine as ours:
        ours.generate([text(3, 20)] * 3, params, num_samples=2)
        ours.generate([[5]], params)  # a window from an empty state
    (stepper,) = strictly.steppers
    assert stepper.num_replays > len(stepper.seen)
    assert {name for calls in stepper.seen.values() for name, *_ in calls} >= {"convolve", "gated_delta", "gate"}


def cramped_samples(directory: Path, num_prompts: int, fails: Callable[[list[int]], bool]) -> list[TrainingSample]:
    kernels = Cramped(fails).kernels
    prompts = [text(seed, 5) for seed in range(num_prompts)]
    with open_cuda(directory, config_of(directory), kernels=kernels) as ours:
        return ours.generate(prompts, replace(PARAMS, max_tokens=6))


def test_a_step_without_memory_aborts_a_request_instead_of_advancing_states_twice(tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path)
    samples = cramped_samples(tmp_path, 3, lambda sizes: sizes[-1] > 8)
    assert [one.finish_reason for one in samples] == ["length", "abort", "abort"]
    assert worst(model, samples[:1]) <= TOLERANCE


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_a_window_without_memory_leaves_no_slot_half_advanced(num_before: int, tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path)
    samples = cramped_samples(tmp_path, 2, lambda sizes: sizes[-1] == 2 and sizes.count(2) == num_before + 1)
    assert [one.finish_reason for one in samples] == ["length", "abort"]
    assert worst(model, samples[:1]) <= TOLERANCE
