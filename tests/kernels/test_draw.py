"""Sampling kernel: against float64, against the torch sampler, and independence of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import sample_with_logprobs
from nano_inference.core.step import Row
from nano_inference.executors.cpu import native
from nano_inference.executors.cpu.drawing import KernelSampler, kernel_normalise
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.sampling import WholeVocabulary, draw
from tests.executors.test_sampling import random_row
from tests.executors.test_sampling import row as row_of
from tests.kernels import reference
from tests.kernels.conftest import Team
from tests.kernels.steps import random
from tests.logit_shapes import SHAPES, shaped

pytestmark = pytest.mark.slow

VOCABS = (1, 7, 8, 16, 511, 512, 513, 1025, 49152)
TEMPERATURES = (0.0, 1e-9, 0.01, 0.5, 1.0, 1.7, 100.0)


def case(vocab_size: int, seed: int) -> tuple[Tensor, list[float], list[float]]:
    """Return rows of logits, temperatures and uniforms (including the limits)."""
    each = 6 if vocab_size < 2000 else 3
    num_rows = each * len(TEMPERATURES)
    logits_BV = torch.randn(num_rows, vocab_size, generator=random(seed)) * torch.logspace(-2, 1.5, num_rows).unsqueeze(
        -1
    )
    logits_BV[1::6] = (logits_BV[1::6] * 2).round()  # ties
    logits_BV[2::6, : vocab_size // 2] = -torch.inf
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=random(seed + 1)).tolist()
    uniforms[::5] = [0.0] * len(uniforms[::5])
    uniforms[4::5] = [1 - 2**-53] * len(uniforms[4::5])
    return logits_BV, [TEMPERATURES[row // each] for row in range(num_rows)], uniforms


def exact(logit_V: Tensor, temperature: float) -> Tensor:
    """Return the distribution in float64."""
    return ((logit_V.double() - logit_V.double().max()) / (temperature or 1.0)).softmax(dim=-1)


def exact_logprob(logit_V: Tensor, temperature: float, token: int) -> float:
    """Return a token's log-probability in float64, with the temperature rounded to float32."""
    divisor = torch.tensor(temperature or 1.0).double()
    below_V = (logit_V.double() - logit_V.double().max()) / divisor
    return float(below_V[token] - below_V.exp().sum().log())


def tolerance_of(logprob: float) -> float:
    """Return the tolerance of a float32 log-probability: 1e-6, or an ulp if that is more."""
    return max(1e-6, math.ulp(logprob) * 2**29)


def is_right(logit_V: Tensor, temperature: float, uniform: float, token: int) -> bool:
    """Return True if the uniform is within 1e-6 of the token's interval of the cumulative distribution."""
    if temperature == 0:
        return token == int((logit_V == logit_V.max()).nonzero()[0])
    p_V = exact(logit_V, temperature)
    end = float(p_V[: token + 1].sum())
    return p_V[token] > 0 and end - float(p_V[token]) - 1e-6 <= uniform <= end + 1e-6


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_tokens_and_logprobs_match_float64(team: Team, vocab_size: int) -> None:
    logits_BV, temperatures, uniforms = case(vocab_size, seed=vocab_size)
    is_raw = [row % 2 == 1 for row in range(len(uniforms))]
    tokens, logprobs = native.draw(team[2], logits_BV, temperatures, uniforms, is_raw)
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        assert is_right(logits_BV[row], temperatures[row], uniforms[row], token), row
        expected = exact_logprob(logits_BV[row], 1.0 if is_raw[row] else temperatures[row], token)
        assert abs(logprob - expected) <= tolerance_of(expected), row
    for threads in (1, 3):
        assert native.draw(team[threads], logits_BV, temperatures, uniforms, is_raw) == (tokens, logprobs)


@pytest.mark.parametrize("name", SHAPES)
def test_log_sum_exp_is_unbiased(teams: dict[str, Team], name: str) -> None:
    """Within 2e-7 of float64 for any vocabulary, and unbiased, before rounding to float32."""
    for vocab_size, num_rows in ((1000, 64), (262_144, 6), (524_288, 3)):
        logits_BV = shaped(name, num_rows, vocab_size)
        for temperature in (1.0, 0.7):
            best_B = logits_BV.amax(dim=-1)
            exact_BV = (logits_BV.double() - best_B.double().unsqueeze(-1)) / torch.tensor(temperature).double()
            exact_B = exact_BV.exp().sum(dim=-1).log()
            for build, team in teams.items():
                made_B, log_mass_B = native.normalise(team[2], logits_BV, [temperature] * num_rows)
                error_B = log_mass_B - exact_B
                assert torch.equal(best_B, made_B), build
                assert float(error_B.abs().max()) <= 2e-7, (build, vocab_size)
                assert abs(float(error_B.mean())) <= 3e-8, (build, vocab_size)
                for threads in (1, 3):
                    alone = [native.normalise(team[threads], row_V[None], [temperature])[1] for row_V in logits_BV[:2]]
                    assert torch.equal(torch.cat(alone), log_mass_B[:2]), build


@pytest.mark.parametrize("name", SHAPES)
def test_logprobs_are_accurate_for_large_vocabularies(teams: dict[str, Team], name: str) -> None:
    logits_BV = shaped(name, 8, 262_144)
    for temperature, is_raw in ((1.0, False), (0.7, False), (0.7, True), (0.0, False)):
        uniforms = torch.rand(8, dtype=torch.float64, generator=random(9)).tolist()
        exact_BV = (logits_BV.double() / torch.tensor(1.0 if is_raw else temperature or 1.0).double()).log_softmax(-1)
        for build, team in teams.items():
            drawn = native.draw(team[2], logits_BV, [temperature] * 8, uniforms, [is_raw] * 8)
            for exact_V, token, logprob in zip(exact_BV, *drawn, strict=True):
                assert abs(logprob - float(exact_V[token])) <= tolerance_of(float(exact_V[token])), (build, temperature)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_reference_and_torch_sampler_draw_the_same_tokens(library: Library, vocab_size: int) -> None:
    logits_BV, temperatures, uniforms = case(vocab_size, seed=100 + vocab_size)
    is_raw = [False] * len(uniforms)
    tokens, logprobs = native.draw(library, logits_BV, temperatures, uniforms, is_raw)
    sampled_B, logprob_B = sample_with_logprobs(
        logits_BV, torch.tensor(temperatures), uniforms_B=torch.tensor(uniforms, dtype=torch.float64)
    )
    others = reference.draw(logits_BV, temperatures, uniforms, is_raw), (sampled_B.tolist(), logprob_B.tolist())
    for other_tokens, other_logprobs in others:
        for row, (mine, theirs) in enumerate(zip(tokens, other_tokens, strict=True)):
            if mine == theirs:
                assert abs(logprobs[row] - other_logprobs[row]) <= tolerance_of(logprobs[row])
            else:
                assert is_right(logits_BV[row], temperatures[row], uniforms[row], mine)
                assert is_right(logits_BV[row], temperatures[row], uniforms[row], theirs)
                assert min(abs(edge - uniforms[row]) for edge in edges(logits_BV[row], temperatures[row])) <= 1e-6


def edges(logit_V: Tensor, temperature: float) -> list[float]:
    return [0.0, *exact(logit_V, temperature).cumsum(dim=0).tolist()]


def test_draws_do_not_depend_on_other_rows(library: Library) -> None:
    logits_BV, temperatures, uniforms = case(1025, seed=3)
    is_raw = [True] * len(uniforms)
    tokens, logprobs = native.draw(library, logits_BV, temperatures, uniforms, is_raw)
    for row in range(len(uniforms)):
        one = slice(row, row + 1)
        assert native.draw(library, logits_BV[one], temperatures[one], uniforms[one], [True]) == (
            tokens[one],
            logprobs[one],
        )


def test_rows_may_be_strided_and_unaligned(library: Library) -> None:
    logits_BV, temperatures, uniforms = case(513, seed=4)
    wide = torch.full((logits_BV.size(0), 530), 1e9)
    wide[:, 3:516] = logits_BV
    is_raw = [False] * len(uniforms)
    clean = native.draw(library, logits_BV, temperatures, uniforms, is_raw)
    assert native.draw(library, wide[:, 3:516], temperatures, uniforms, is_raw) == clean


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_undrawable_row_reports_nan_and_does_not_affect_others(library: Library, temperature: float) -> None:
    for spoiled in ([math.nan], [math.inf], [math.inf, math.nan], [-math.inf] * 600):
        check_undrawable(library, spoiled, temperature)


def check_undrawable(library: Library, spoiled: list[float], temperature: float) -> None:
    logits_BV = torch.randn(3, 600, generator=random(5))
    clean = native.draw(library, logits_BV, [temperature] * 3, [0.5] * 3, [True] * 3)
    logits_BV[1, : len(spoiled)] = torch.tensor(spoiled)
    for tokens, logprobs in (
        native.draw(library, logits_BV, [temperature] * 3, [0.5] * 3, [True] * 3),
        reference.draw(logits_BV, [temperature] * 3, [0.5] * 3, [True] * 3),
    ):
        assert 0 <= tokens[1] < 600 and math.isnan(logprobs[1])
        assert (tokens[0], tokens[2]) == (clean[0][0], clean[0][2])
        assert [logprobs[0], logprobs[2]] == pytest.approx([clean[1][0], clean[1][2]], abs=1e-5)


def test_tokens_without_probability_are_never_drawn(library: Library) -> None:
    logits_BV = torch.full((64, 2000), -torch.inf)
    logits_BV[:, [5, 700, 1500]] = torch.tensor([0.0, 1.0, 0.5])
    # Uniforms are below 1; 1.0 simulates rounding.
    uniforms = [index / 64 for index in range(62)] + [1 - 2**-53, 1.0]
    for made in (
        native.draw(library, logits_BV, [1.0] * 64, uniforms, [False] * 64),
        reference.draw(logits_BV, [1.0] * 64, uniforms, [False] * 64),
    ):
        assert set(made[0]) == {5, 700, 1500}
        assert made[0][0] == 5 and made[0][-2:] == [1500, 1500]


def test_greedy_draws_lowest_token_among_ties(library: Library) -> None:
    logits_BV = torch.zeros(3, 1030)
    logits_BV[1, [17, 600, 1029]] = 2.0
    logits_BV[2, 1029] = 2.0
    assert native.draw(library, logits_BV, [0.0] * 3, [0.9] * 3, [False] * 3)[0] == [0, 17, 1029]
    assert reference.draw(logits_BV, [0.0] * 3, [0.9] * 3, [False] * 3)[0] == [0, 17, 1029]


def random_draws(seed: int, count: int, vocab_size: int) -> tuple[Tensor, list[Row]]:
    """Return logits, some tied, impossible or all equal, and rows with random options."""
    rng = Random(seed)
    rows = []
    for number in range(count):
        one = random_row(rng, number, vocab_size)
        more: Any = {"raw_logprobs": rng.random() < 0.3, "sampling_mask": rng.random() < 0.3}
        more["logprob_token_ids"] = (3, 1, 9) if one.params.logprobs is not None and rng.random() < 0.3 else ()
        params = replace(one.params, frequency_penalty=rng.choice([0, 0.3]), **more)
        rows.append(one._replace(params=params))
    logits_BV = torch.randn(count, vocab_size, generator=random(seed)) * rng.choice([0.0, 0.3, 2.5, 8.0])
    logits_BV = logits_BV.round() if seed % 3 == 0 else logits_BV
    if seed % 4 == 0:
        logits_BV[:, ::3] = -torch.inf
    return logits_BV, rows


@pytest.mark.parametrize(("vocab_size", "num_cases"), [(40, 40), (513, 40), (1300, 20), (49_157, 3)])
def test_options_give_the_references_bits(team: Team, vocab_size: int, num_cases: int) -> None:
    """Tokens, log-probabilities of every mode, alternatives, sampling masks: the same bits as `sampling.draw`."""
    vocabulary = WholeVocabulary(kernel_normalise(team[1]))
    for seed in range(num_cases):
        logits_BV, rows = random_draws(seed, 8, vocab_size)
        expected = draw(logits_BV.clone(), rows, vocabulary)
        for threads in (1, 3):
            assert repr(KernelSampler(team[threads])(logits_BV.clone(), rows)) == repr(expected), seed


def test_whole_vocabulary_of_a_flat_nucleus(library: Library) -> None:
    logits_BV = torch.randn(2, 49_157, generator=random(3)) * 0.01
    rows = [row_of(logprobs=49_157, sampling_mask=True, **one) for one in ({"top_p": 0.97}, {"top_k": 40_000})]
    expected = draw(logits_BV.clone(), rows, WholeVocabulary(kernel_normalise(library)))
    assert KernelSampler(library)(logits_BV, rows) == expected
