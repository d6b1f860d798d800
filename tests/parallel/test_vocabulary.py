"""Sampling from divided logits against sampling from whole ones."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.core.step import Row, RowResult
from nano_inference.executors.sampling import WHOLE, draw
from nano_inference.parallel.links import Links
from nano_inference.parallel.shard import vocabulary_part
from nano_inference.parallel.vocabulary import ShardedVocabulary
from nano_inference.types import SamplingParams
from tests.parallel.ranks import on_ranks
from tests.rows import make_row

VOCAB = 1100


def row(number: int, rng: random.Random, **params: Any) -> Row:
    history = tuple(rng.randrange(VOCAB) for _ in range(12))
    mode = rng.choice(("raw", "tempered", "processed"))
    fields = {"params": SamplingParams(**params), "logprobs_mode": mode, "history": history, "num_prompt": 4}
    return make_row(number, start=5 + number, num_sampled=1, seed=number, **fields)


def random_rows(rng: random.Random, count: int) -> list[Row]:
    rows = []
    for number in range(count):
        params: dict[str, Any] = {
            "temperature": rng.choice((0, 0.3, 1, 1, 2.5)),
            "top_k": rng.choice((0, 0, 1, 7, 300)),
            "top_p": rng.choice((1, 1, 0.1, 0.7, 0.95)),
            "min_p": rng.choice((0, 0, 0.05)),
            "logprobs": rng.choice((None, 0, 3, 20)),
            "raw_logprobs": rng.random() < 0.3,
            "sampling_mask": rng.random() < 0.3,
            "repetition_penalty": rng.choice((1, 1.3)),
            "presence_penalty": rng.choice((0, 0.5)),
        }
        if rng.random() < 0.3:
            params["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(5)}
        if rng.random() < 0.3:
            params["allowed_token_ids"] = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 20, 900)))]
        one = row(number, rng, **params)
        if rng.random() < 0.3:
            one = one._replace(mask=rng.randbytes(rng.choice((5, -(-VOCAB // 8)))))
        if rng.random() < 0.3:
            one = one._replace(banned=tuple(rng.randrange(VOCAB) for _ in range(3)))
        rows.append(one)
    return rows


def drawn(logits_BV: Tensor, rows: list[Row], size: int) -> list[list[RowResult]]:
    """Draw on every rank from its part of the logits."""

    def work(links: Links) -> list[RowResult]:
        part = vocabulary_part(logits_BV.size(-1), links.rank, links.size)
        own_BV = logits_BV[:, part.start : part.stop].clone()
        return draw(own_BV, rows, ShardedVocabulary(links.data, part))

    return on_ranks(size, work)


def close(one: float | None, other: float | None) -> bool:
    if one is None or other is None or not math.isfinite(one):
        return repr(one) == repr(other)
    return one == pytest.approx(other, abs=2e-6)


def assert_same(mine: RowResult, right: RowResult) -> None:
    assert mine.tokens == right.tokens
    assert close(mine.logprobs[0], right.logprobs[0])
    assert [[top.token for top in tops] for tops in mine.top_logprobs] == [
        [top.token for top in tops] for tops in right.top_logprobs
    ]
    for tops, others in zip(mine.top_logprobs, right.top_logprobs, strict=True):
        assert all(close(top.logprob, other.logprob) for top, other in zip(tops, others, strict=True))
    assert len(mine.extras) == len(right.extras)
    for extra, other in zip(mine.extras, right.extras, strict=True):
        assert close(extra.raw_logprob, other.raw_logprob) and extra.sampling_mask == other.sampling_mask


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_draws_are_those_of_the_whole_vocabulary(size: int, seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 60)
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(60, VOCAB, generator=generator) * 3
    logits_BV[::3] = logits_BV[::3].round()  # many equal logits: the lowest ids win
    expected = draw(logits_BV.clone(), rows)
    found = drawn(logits_BV, rows, size)
    assert len(set(map(repr, found))) == 1, "ranks differ"
    for mine, right in zip(found[0], expected, strict=True):
        assert_same(mine, right)


def test_rows_without_a_valid_token_report_it_on_every_rank() -> None:
    rng = random.Random(0)
    rows = [row(number, rng) for number in range(4)]
    logits_BV = torch.randn(4, VOCAB)
    logits_BV[0, 1000] = torch.nan  # the last rank's
    logits_BV[1] = -torch.inf
    logits_BV[2, :600] = -torch.inf  # all of rank 0's
    found = drawn(logits_BV, rows, 2)
    expected = draw(logits_BV.clone(), rows)
    assert repr(found[0]) == repr(found[1])
    for index in (0, 1):
        assert not math.isfinite(found[0][index].logprobs[0]) and not math.isfinite(expected[index].logprobs[0])
    for index in (2, 3):
        assert_same(found[0][index], expected[index])


def test_scores_and_ranks_are_those_of_the_whole_vocabulary() -> None:
    logits_BV = torch.randn(5, VOCAB).round(decimals=1)
    token_B = torch.tensor([0, 575, 576, 1099, 600])
    temperatures = [1.0, 0.5, 2.0, 0.0, 1.0]

    def work(links: Links) -> tuple[list[float], list[int]]:
        part = vocabulary_part(VOCAB, links.rank, links.size)
        own_BV, vocabulary = logits_BV[:, part.start : part.stop].clone(), ShardedVocabulary(links.data, part)
        at_B1 = vocabulary.at(own_BV, token_B)
        logprob_B1 = vocabulary.normalise(own_BV, temperatures).logprobs(at_B1)
        return logprob_B1.flatten().tolist(), vocabulary.ranks(own_BV, at_B1)

    at_B1 = WHOLE.at(logits_BV, token_B)
    right = WHOLE.normalise(logits_BV, temperatures).logprobs(at_B1).flatten().tolist()
    for logprobs, ranks in on_ranks(2, work):
        assert logprobs == pytest.approx(right, abs=1e-6)
        assert ranks == WHOLE.ranks(logits_BV, at_B1)
