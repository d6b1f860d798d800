"""The CUDA executor on CPU tensors against the C path, which Transformers and llama.cpp were compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from tests.cuda.engines import open_cuda
from tests.cuda.models import NAMES, config_of, prompts, write_model
from tests.cuda.strict import Strictly
from tests.engine.test_batch_invariance import ThreadsKept
from tests.engine.test_lookahead import REQUESTS, run_all
from tests.models.families import make_model, others_nightly

pytestmark = pytest.mark.slow

KINDS = [replace(one, num_samples=min(one.num_samples, 1 + (i < 3))) for i, one in enumerate(REQUESTS)]
"""All kinds of request; few have several samples."""


def assert_same(mine: list[TrainingSample], right: list[TrainingSample]) -> None:
    assert [sample.completion_tokens for sample in mine] == [sample.completion_tokens for sample in right]
    for one, other in zip(mine, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)


@pytest.mark.parametrize("name", others_nightly(NAMES))
def test_every_family_is_the_c_path(name: str, tmp_path: Path) -> None:
    """Two windows of up to 4 steps. They only launch kernels, on the same memory each time (`Strictly`)."""
    write_model(name, tmp_path)
    with InferenceEngine(config_of(tmp_path)) as ours:
        assert ours.parts.code not in ("torch", "cuda"), "these tests need a C compiler"
        longest = ours.parts.max_model_len - 40
        asked = prompts(ours.parts.vocab_size, longest)
        params = [SamplingParams(max_tokens=7, seed=i, temperature=float(i % 3 > 0)) for i in range(len(asked))]
        right, scored = ours.generate(asked, params), [ours.score(prompt) for prompt in asked[3:6]]
    strictly = Strictly(tmp_path, config_of(tmp_path, lookahead=4), most_checks=2)
    with strictly.engine as theirs:
        assert theirs.parts.code == "cuda"
        assert_same(theirs.generate(asked, params), right)
        for one, other in zip([theirs.score(prompt) for prompt in asked[3:6]], scored, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert any(key.has_groups for stepper in strictly.steppers for key in stepper.seen)


def flat(sample: TrainingSample) -> list[float]:
    """Return all numbers that a sample reports beside its log-probabilities, and the ids of its top tokens."""
    tops = [one for top in sample.top_logprobs or () for one in top or ()]
    known = [value for value in sample.prompt_logprobs or () if value is not None]
    raw = [value for value in sample.raw_logprobs or () if value is not None]
    return [*known, *raw, *(one.logprob for one in tops), *(float(one.token) for one in tops)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cuda")
    make_model("llama3-rope-ratio3-tied", directory)
    return directory


@pytest.fixture(scope="module")
def answers(tiny: Path) -> list[TrainingSample]:
    """The C path's samples of all kinds of request."""
    with ThreadsKept(), InferenceEngine(config_of(tiny)) as ours:
        return run_all(ours, KINDS)[0]


TIGHT = {"max_tokens_per_batch": 24, "max_batch_size": 5, "block_size": 4}


@pytest.mark.parametrize(
    ("lookahead", "options"), [(1, {}), (16, TIGHT), pytest.param(3, TIGHT, marks=pytest.mark.nightly)]
)
def test_every_kind_of_request_is_the_c_path(
    lookahead: int, options: dict[str, Any], tiny: Path, answers: list[TrainingSample]
) -> None:
    with open_cuda(tiny, config_of(tiny, lookahead=lookahead, **options)) as theirs:
        samples, stats = run_all(theirs, KINDS)
    assert_same(samples, answers)
    for one, other in zip(samples, answers, strict=True):
        assert (one.sampling_masks, one.mask) == (other.sampling_masks, other.mask)
        assert flat(one) == pytest.approx(flat(other), abs=1e-4)
    assert any(step.num_sampled > step.num_rows for step in stats) == (lookahead > 1)


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_every_reported_number_is_the_c_path(mode: str, tiny: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.8, "logit_bias": {5: 3.0, 9: -2.0}},
        {"temperature": 1.3, "min_p": 0.05, "allowed_token_ids": list(range(3, 90))},
        {"temperature": 0.9, "top_k": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
        {"temperature": 0, "min_tokens": 6, "stop_token_ids": list(range(0, 160, 3))},
    ]
    params = [SamplingParams(max_tokens=12, seed=i, logprobs=3, raw_logprobs=True, **row) for i, row in enumerate(rows)]
    prompts = [[4, 8, 15, 16, 23, 42]] * len(rows)
    with InferenceEngine(config_of(tiny, logprobs_mode=mode)) as ours:
        right = ours.generate(prompts, params)
    with open_cuda(tiny, config_of(tiny, logprobs_mode=mode)) as theirs:
        mine = theirs.generate(prompts, params)
    assert_same(mine, right)
    for one, other in zip(mine, right, strict=True):
        assert flat(one) == pytest.approx(flat(other), abs=1e-4) and len(flat(one)) > 40
