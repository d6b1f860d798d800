"""Log-probabilities against float64 on large vocabularies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import sample_with_logprobs
from nano_inference.core.step import Row
from nano_inference.executors.logprobs import Normaliser, normalise
from nano_inference.types import LogprobsMode, SamplingParams
from tests.draws import draw
from tests.logit_shapes import SHAPES, shaped
from tests.rows import make_row

VOCAB = 262_144


def exact(logits_BV: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities in float64; a temperature is a float32."""
    divisor = torch.tensor(temperature or 1.0).double()
    return ((logits_BV.double() - logits_BV.double().amax(-1, keepdim=True)) / divisor).log_softmax(-1)


def allowed(logprob: float) -> float:
    """1e-6, or an ulp where that is more."""
    return max(1e-6, math.ulp(logprob) * 2**29)


def row(number: int, mode: LogprobsMode, **params: Any) -> Row:
    return make_row(number, start=5, num_sampled=1, logprobs_mode=mode, seed=number, params=SamplingParams(**params))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_sampled_logprobs_are_unbiased_over_a_large_vocabulary(name: str, temperature: float) -> None:
    logits_BV = shaped(name, 8, VOCAB)
    uniforms_B = torch.linspace(0.05, 0.95, 8, dtype=torch.float64)
    token_B, logprob_B = sample_with_logprobs(logits_BV, torch.full((8,), temperature), uniforms_B=uniforms_B)
    expected_B = exact(logits_BV, temperature).gather(-1, token_B[:, None])[:, 0]
    assert torch.equal(logprob_B, expected_B.float()), "float64, rounded once"


@pytest.mark.parametrize("name", ["normal", "flat with a peak"])
@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_every_reported_logprob_is_accurate_over_a_large_vocabulary(mode: LogprobsMode, name: str) -> None:
    """Drawn tokens, the likeliest ones and raw log-probabilities, with a truncation, under each mode."""
    logits_BV = shaped(name, 4, VOCAB)
    top_k = VOCAB // 2
    rows = [row(i, mode, temperature=0.7, top_k=top_k, logprobs=3, raw_logprobs=True) for i in range(4)]
    drawn = draw(logits_BV.clone(), rows)
    for i, logit_V in enumerate(logits_BV):
        raw_V, tempered_V = exact(logit_V), exact(logit_V, 0.7)
        processed_V = tempered_V - tempered_V.topk(top_k).values.logsumexp(-1)
        expected_V = {"raw": raw_V, "tempered": tempered_V, "processed": processed_V}[mode]
        reported = [(drawn.tokens[i], drawn.logprobs[i]), *((top.token, top.logprob) for top in drawn.top_logprobs[i])]
        assert len(reported) == 4
        for token, logprob in reported:
            assert abs(logprob - float(expected_V[token])) <= allowed(logprob)
        raw = drawn.extras[i].raw_logprob
        assert raw is not None and abs(raw - float(raw_V[drawn.tokens[i]])) <= allowed(raw)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", [5, 512, 1300, 49_157, VOCAB])
def test_normaliser_does_not_depend_on_batch_or_threads(vocab_size: int, threads: int) -> None:
    logits_BV = shaped("normal", 7, vocab_size)
    temperatures = [0.0, 0.3, 1.0, 1.0, 1.7, 0.01, 1e-40]
    together = normalise(logits_BV, temperatures)
    exact_B = torch.stack([exact(logits_BV[i], t)[logits_BV[i].argmax()] for i, t in enumerate(temperatures[:-1])])
    assert float((together.log_mass[:-1, 0] + exact_B).abs().max()) < 1e-13
    for i, temperature in enumerate(temperatures):
        alone = normalise(logits_BV[i : i + 1], [temperature])
        assert all(torch.equal(part[i : i + 1], own) for part, own in zip(together, alone, strict=True))


def test_row_with_nan_has_no_logprobs_and_leaves_others_unaffected() -> None:
    logits_BV = torch.randn(5, 700, generator=torch.Generator().manual_seed(3))
    clean = normalise(logits_BV, [1.0] * 5)
    logits_BV[0, 3], logits_BV[1, 3], logits_BV[2] = math.nan, math.inf, -math.inf
    spoiled: Normaliser = normalise(logits_BV, [1.0] * 5)
    assert spoiled.log_mass[:3].isnan().all()
    assert torch.equal(spoiled.log_mass[3:], clean.log_mass[3:])
    rows = [row(i, "raw", logprobs=2) for i in range(5)]
    drawn = draw(logits_BV, rows)
    assert [len(tops) for tops in drawn.top_logprobs] == [0, 0, 0, 2, 2]
    assert [math.isnan(logprob) for logprob in drawn.logprobs] == [True, True, True, False, False]
