"""Drawing: the right distribution, the exact support, and no row ever touched by its mates."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.core.seeds import derive_seed, uniform
from nano_inference.core.step import Row
from nano_inference.executors.sampling import adjust_logits, invert_cdf
from nano_inference.executors.truncation import Truncation, truncate_row
from nano_inference.types import LogprobsMode, SamplingParams
from tests.draws import Draw, draw
from tests.rows import make_row

INF = math.inf


def row(number: int = 0, mode: LogprobsMode = "processed", more: Any = None, **params: Any) -> Row:
    plain: dict[str, Any] = {"start": 5, "num_sampled": 1, "seed": params.pop("seed", number), "logprobs_mode": mode}
    return make_row(number, **plain | {"params": SamplingParams(**params)} | (more or {}))


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw_one(logits_V: Tensor, one: Row) -> Draw:
    return draw(logits_V[None].clone(), [one])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 2])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits_V = randn(24, scale=1.5)
    uniform_B = torch.tensor([uniform(11, 0, position) for position in range(40_000)], dtype=torch.float64)
    token_B = invert_cdf((logits_V / temperature).expand(40_000, -1), uniform_B)
    found_V = torch.bincount(token_B, minlength=24) / 40_000
    assert float((found_V - torch.softmax(logits_V / temperature, -1)).abs().sum() / 2) < 0.015
    rows = [row(seed=11, temperature=temperature, more={"start": position - 1}) for position in range(50)]
    assert draw(logits_V.expand(50, -1).clone(), rows).tokens == tuple(token_B[:50].tolist())


def test_the_cdf_is_inverted_by_id_across_blocks_of_the_vocabulary() -> None:
    logits_V = randn(1300).index_fill(0, torch.tensor([0, 511, 512, 1299]), -INF)
    logp_V = torch.log_softmax(logits_V.double(), -1)
    uniform_B = torch.linspace(0, 1 - 2**-53, 4001, dtype=torch.float64)
    token_B = invert_cdf(logits_V.expand(4001, -1), uniform_B)
    cdf_V = logp_V.exp().cumsum(-1)
    assert ((cdf_V[token_B] + 1e-6 >= uniform_B) & (cdf_V[token_B - 1] - 1e-6 <= uniform_B)).all()
    assert torch.isfinite(logp_V[token_B]).all(), "impossible tokens are never drawn"
    assert (token_B.diff() >= 0).all()
    logits_BV = randn(50, 512).index_fill(1, torch.arange(300, 512), -INF)
    assert (invert_cdf(logits_BV, torch.full((50,), 1 - 2**-53, dtype=torch.float64)) < 300).all(), "nor by rounding"


def naive_support(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Spec 9 by hand: sort by value, lowest id first among equals; cut; renormalise; cut; cut."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp(logits[i] - logits[order[0]]) for i in order}
    kept = order[: top_k or len(order)]
    if top_p < 1:
        masses = list(accumulate(weight[i] for i in kept))
        kept = kept[: sum(mass < top_p * masses[-1] for mass in masses) + 1]
    return {i for i in kept if weight[i] >= min_p and logits[i] > -INF}


def support(logits_V: Tensor, cut: Truncation) -> set[int]:
    logits_V = logits_V.clone()
    truncate_row(logits_V, cut)
    return set(logits_V.isfinite().nonzero().flatten().tolist())


def test_truncation_keeps_exactly_the_right_tokens() -> None:
    rng = random.Random(0)
    for seed in range(400):
        size = rng.choice([1, 2, 7, 50, 300, 1500])
        logits_V = randn(size, seed=seed, scale=rng.choice([0.02, 1, 4]))
        if seed % 3 == 0:
            logits_V = logits_V.mul(2).round().div(2)  # many ties
        if seed % 5 == 0 and size > 7:
            logits_V[::3] = -INF
        top_k = rng.choice([0, 1, 3, 40, 2000])
        top_p = rng.choice([1.0, rng.random() * 0.998 + 0.001])
        min_p = rng.choice([0.0, rng.random() ** 3])
        expected = naive_support(logits_V.double().tolist(), top_k, top_p, min_p)
        assert support(logits_V, Truncation(top_k, top_p, min_p)) == expected, (size, top_k, top_p, min_p)


def test_ties_keep_lowest_ids_and_top_p_applies_after_top_k() -> None:
    assert support(torch.zeros(8), Truncation(3, 1.0, 0.0)) == {0, 1, 2}
    assert support(torch.zeros(8), Truncation(0, 0.5, 0.0)) == {0, 1, 2, 3}
    assert support(torch.zeros(3000), Truncation(0, 0.75, 0.0)) == set(range(2250))
    assert support(torch.zeros(8), Truncation(4, 0.5, 0.0)) == {0, 1}
    assert support(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), Truncation(3, 1.0, 0.0)) == {0, 1, 3}
    assert support(torch.tensor([0.5, 0.5]).log(), Truncation(0, 1.0, 1.0)) == {0, 1}
    assert support(randn(9), Truncation(0, 1e-9, 0.0)) == {int(randn(9).argmax())}


def test_greedy_is_the_highest_logit_and_the_lowest_id_on_a_tie() -> None:
    logits_V = torch.tensor([1.0, 7.0, 7.0, 7.0 - 1e-6, 2.0])
    for mode in ("raw", "tempered", "processed"):
        drawn = draw_one(logits_V, row(mode=mode, temperature=0, top_k=1, logprobs=5))
        assert drawn.tokens == (1,)
        assert drawn.logprobs[0] == float(torch.log_softmax(logits_V.double(), -1)[1].float()), (
            "at temperature 1, nothing cut"
        )
    assert draw_one(logits_V, row(temperature=0, logit_bias={4: 6})).tokens == (4,)


def random_row(rng: random.Random, number: int, vocab_size: int) -> Row:
    pick = rng.choice
    ids = [rng.randrange(vocab_size) for _ in range(20)]
    params = {"temperature": pick([0, 0.3, 1, 1, 1.7]), "top_k": pick([0, 0, 5, 60]), "top_p": pick([1, 1, 0.4, 0.95])}
    params |= {"min_p": pick([0, 0, 0.1]), "logprobs": pick([None, 0, 2, 7, 30]), "presence_penalty": pick([0, 0.6])}
    params |= {"repetition_penalty": pick([1, 1.3]), "logit_bias": pick([{}, {3: 2.5, 9: -4}])}
    params |= {"allowed_token_ids": pick([None, None, ids])}
    mask = pick([None, None, rng.randbytes(-(-vocab_size // 8))])
    options = {"start": rng.randrange(900), "num_prompt": 9, "banned": pick([(), (4, 6)]), "mask": mask}
    options |= {"history": pick([(), tuple(ids)])}
    return row(number, rng.choice(["raw", "tempered", "processed"]), more=options, **params)


@pytest.mark.slow
def test_row_is_bit_identical_in_any_batch() -> None:
    rng = random.Random(1)
    for trial in range(60):
        vocab_size = rng.choice([40, 513, 1300])
        rows = [random_row(rng, i, vocab_size) for i in range(rng.randrange(2, 12))]
        logits_BV = randn(len(rows), vocab_size, seed=trial)
        logits_BV = logits_BV.round() if trial % 2 else logits_BV  # ties everywhere
        together = draw(logits_BV.clone(), rows)
        for i, one in enumerate(rows):
            mine = (x[i : i + 1] for x in (together.tokens, together.logprobs, together.top_logprobs))
            assert repr(draw_one(logits_BV[i], one)) == repr(Draw(*mine))


def naive_adjusted(logits: list[float], one: Row) -> list[float]:
    p, out = one.params, list(logits)
    for token in set(one.history):
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    for token in one.history[one.num_prompt :]:
        out[token] -= p.frequency_penalty
    for token in set(one.history[one.num_prompt :]):
        out[token] -= p.presence_penalty
    for token, bias in p.logit_bias.items():
        out[token] += bias
    for token in range(len(out)):
        bit = one.mask is None or one.mask[token // 8] >> (token % 8) & 1
        allowed = p.allowed_token_ids is None or token in p.allowed_token_ids
        if not bit or not allowed or token in one.banned:
            out[token] = -INF
    return out


def adjusted_row(mode: LogprobsMode = "processed", **params: Any) -> Row:
    options = {"history": (1, 2, 3, 2, 2, 5), "num_prompt": 3, "banned": (6,), "mask": bytes([0b11111110, 0b111])}
    params |= {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5, "logit_bias": {4: 1.5}}
    return row(mode=mode, more=options, **params, allowed_token_ids=[0, 1, 2, 3, 4, 5, 6, 9, 11])


def test_penalties_bias_and_masks_equal_naive_versions() -> None:
    logits_V, one = randn(12, seed=3), adjusted_row()
    expected_V = torch.tensor(naive_adjusted(logits_V.tolist(), one))
    adjust_logits(logits_V, one)
    assert torch.allclose(logits_V, expected_V, atol=1e-6)
    assert set(logits_V.isfinite().nonzero().flatten().tolist()) == {1, 2, 3, 4, 5, 9}


@pytest.mark.parametrize("temperature", [0, 0.6, 1])
@pytest.mark.parametrize("adjusted", [False, True])
def test_logprobs_modes_equal_softmax_of_their_distribution(temperature: float, adjusted: bool) -> None:
    make = adjusted_row if adjusted else row
    logits_V = randn(12, seed=4)
    changed_V = torch.tensor(naive_adjusted(logits_V.tolist(), make())).double() if adjusted else logits_V.double()
    divisor = torch.tensor(temperature or 1.0).double()  # a temperature is a float32
    tempered_V = torch.log_softmax(changed_V / divisor, -1)
    kept_V = torch.zeros(12).index_fill(0, torch.topk(tempered_V, 3).indices, 1).bool()
    processed_V = torch.log_softmax((changed_V / divisor).masked_fill(~kept_V, -INF), -1)
    expected = {"raw": torch.log_softmax(logits_V.double(), -1), "tempered": tempered_V, "processed": processed_V}
    if not temperature:
        expected["processed"] = tempered_V
    for mode, logp_V in expected.items():
        drawn = draw_one(logits_V, make(mode=mode, temperature=temperature, top_k=3, logprobs=12))
        assert bool(kept_V[drawn.tokens[0]])
        assert drawn.logprobs[0] == float(logp_V[drawn.tokens[0]].float())
        order = sorted((i for i in range(12) if logp_V[i] > -INF), key=lambda i: -float(logp_V[i]))
        assert [top.token for top in drawn.top_logprobs[0]] == order, "likeliest first, the impossible left out"
        assert [top.logprob for top in drawn.top_logprobs[0]] == logp_V[order].float().tolist()


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
@pytest.mark.parametrize("temperature", [0, 0.5, 1])
def test_row_without_drawable_token_has_nonfinite_logprob(mode: LogprobsMode, temperature: float) -> None:
    blocked = row(mode=mode, temperature=temperature, top_p=0.9, allowed_token_ids=[3], more={"banned": (3,)})
    drawn = draw(randn(2, 9), [blocked, row(1)])
    assert [math.isfinite(logprob) for logprob in drawn.logprobs] == [False, True]


def test_top_logprobs_break_ties_by_id() -> None:
    drawn = draw(torch.zeros(2, 700), [row(logprobs=3), row(logprobs=200)])
    assert [[top.token for top in tops] for tops in drawn.top_logprobs] == [[0, 1, 2], list(range(200))]


def test_uniforms_are_unchanged_since_the_first_release() -> None:
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(1, 2, 3) == 0.814259011529328
    assert uniform(2**63, 5, 1000) == 0.05285568538961394
    assert uniform(-1, 0, 7) == uniform(2**64 - 1, 0, 7) == 0.14119421699853907
    assert derive_seed(3, 0) != derive_seed(3, 1) != derive_seed(4, 1)


def test_uniforms_are_even_and_depend_on_every_argument() -> None:
    cube = [[[uniform(s, i, p) for p in range(30)] for i in range(30)] for s in range(30)]
    values = torch.tensor(cube, dtype=torch.float64)
    assert values.unique().numel() == values.numel() and values.min() >= 0 and values.max() < 1
    assert float(values.mean()) == pytest.approx(0.5, abs=0.006)
    assert torch.histc(values, 10, 0, 1).div(2700).sub(1).abs().max() < 0.08
    for dim in range(3):
        a, b = values.narrow(dim, 0, 29).flatten(), values.narrow(dim, 1, 29).flatten()
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
