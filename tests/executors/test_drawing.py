"""`KernelSampler`: each row is drawn as it is alone, and as `sampling.draw` draws it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nano_inference.core.seeds import uniform
from nano_inference.core.step import DrawExtras, Row
from nano_inference.executors.cpu.drawing import KernelSampler, kernel_normalise
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.sampling import WholeVocabulary
from nano_inference.types import LogprobsMode, SamplingParams
from tests.draws import Draw, columns, draw
from tests.rows import make_row

SPECIAL: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "logprobs": {"logprobs": 3},
    "logit_bias": {"logit_bias": {3: 2.5, 9: -4.0}},
    "allowed": {"allowed_token_ids": [1, 4, 9, 33]},
    "raw_logprobs": {"raw_logprobs": True},
    "sampling_mask": {"sampling_mask": True, "top_k": 7},
    "whole sampling_mask": {"sampling_mask": True},
    "penalty": {"presence_penalty": 0.6, "repetition_penalty": 1.3, "more": {"history": (3, 4, 4, 8), "num_prompt": 1}},
    "banned": {"more": {"banned": (4, 6)}},
    "mask": {"more": {"mask": b"\x5a\x33" * 200}},
    "greedy with logprobs": {"temperature": 0, "logprobs": 2},
}
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.2},
    "greedy": {"temperature": 0},
    "greedy truncated": {"temperature": 0, "top_k": 3, "top_p": 0.5},
    "raw": {"mode": "raw", "temperature": 0.7},
    "tempered": {"mode": "tempered", "temperature": 0.7},
    "no logprobs": {"logprobs": 0},
}
ALL = SPECIAL | PLAIN


@pytest.fixture(scope="module")
def sampler(library: Library) -> KernelSampler:
    return KernelSampler(library)


def row(number: int, mode: LogprobsMode = "processed", more: Any = None, **params: Any) -> Row:
    plain: dict[str, Any] = {"start": number % 90, "num_sampled": 1, "seed": number, "sample_index": number % 3}
    plain |= {"logprobs_mode": mode, "params": SamplingParams(**params)}
    return make_row(number, (1, 2), **plain | (more or {}))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2.5


def drawn(sampler: KernelSampler, logits_BV: Tensor, rows: list[Row]) -> Draw:
    return columns(sampler(logits_BV, rows))


def one_of(found: Draw, place: int) -> tuple[Any, ...]:
    """All that a draw says of one row."""
    extras = found.extras[place] if found.extras else DrawExtras()
    return found.tokens[place], found.logprobs[place], found.top_logprobs[place], extras


class LargeOperations(TorchFunctionMode):
    """Records torch's functions on enough values to be divided among threads.

    Those wait for each other by spinning: beside busy processes, that takes most of a step.
    """

    VIEWS = frozenset({"size", "stride", "data_ptr", "__get__", "__getitem__", "numpy"})

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in (*args, found) if isinstance(one, Tensor)]
        if max(sizes, default=0) >= 1 << 15 and func.__name__ not in self.VIEWS:
            self.names.append(func.__name__)
        return found


def test_no_row_is_drawn_by_torchs_threads(sampler: KernelSampler) -> None:
    logits_BV = randn(len(ALL), 49_152)
    with torch.inference_mode(), LargeOperations() as seen:
        sampler(logits_BV, [row(number, **ALL[name]) for number, name in enumerate(ALL)])
    assert seen.names == []


@pytest.mark.parametrize("name", SPECIAL)
def test_options_are_drawn_as_the_reference_draws_them(name: str, sampler: KernelSampler, library: Library) -> None:
    one = row(1, **ALL[name])
    expected = draw(randn(1, 513), [one], WholeVocabulary(kernel_normalise(library)))
    found = drawn(sampler, randn(1, 513), [one])
    assert repr(found) == repr(expected)
    assert bool(found.extras) == (one.params.raw_logprobs or one.params.sampling_mask)


@pytest.mark.parametrize("vocab_size", [40, 513, 1300])
@pytest.mark.parametrize("seed", range(6))
def test_row_result_does_not_depend_on_the_batch(vocab_size: int, seed: int, sampler: KernelSampler) -> None:
    rng = random.Random(seed)
    names = [rng.choice(list(ALL)) for _ in range(rng.randrange(2, 25))]
    rows = [row(100 * seed + i, **ALL[name]) for i, name in enumerate(names)]
    logits_BV = randn(len(rows), vocab_size, seed=seed)
    logits_BV = logits_BV.round() if seed % 3 == 0 else logits_BV  # ties everywhere
    together = drawn(sampler, logits_BV.clone(), rows)
    assert len(together.tokens) == len(together.logprobs) == len(together.top_logprobs) == len(rows)
    for i, one in enumerate(rows):
        alone = drawn(sampler, logits_BV[i : i + 1].clone(), [one])
        assert repr(one_of(together, i)) == repr(one_of(alone, 0)), (names[i], names)


def test_kernel_tokens_equal_torch_tokens(sampler: KernelSampler) -> None:
    """They may differ only where the uniform lies on a border between two tokens, to what float32 can say."""
    names = [name for name in PLAIN for _ in range(150)]
    rows = [row(i, **PLAIN[name]) for i, name in enumerate(names)]
    logits_BV = randn(len(rows), 700, seed=9)
    mine, torchs = drawn(sampler, logits_BV.clone(), rows), draw(logits_BV.clone(), rows)
    num_equal = 0
    for i, one in enumerate(rows):
        if mine.tokens[i] == torchs.tokens[i]:
            num_equal += 1
            assert abs(mine.logprobs[i] - torchs.logprobs[i]) <= 1e-5 * max(1.0, -mine.logprobs[i]), names[i]
        else:
            cdf_V = (logits_BV[i].double() / one.params.temperature).softmax(-1).cumsum(-1)
            place = uniform(one.seed, one.sample_index, one.start + len(one.tokens))
            assert float((cdf_V - place).abs().min()) < 1e-6
    assert num_equal >= len(rows) - 3


def test_row_without_finite_logits_leaves_others_unaffected(sampler: KernelSampler) -> None:
    rows = [row(0), row(1, top_k=4), row(2), row(3, top_k=4)]
    logits_BV = randn(4, 300)
    clean = drawn(sampler, logits_BV.clone(), rows)
    logits_BV[:2] = math.nan
    found = drawn(sampler, logits_BV, rows)
    assert math.isnan(found.logprobs[0]) and math.isnan(found.logprobs[1])
    assert [one_of(found, i) for i in (2, 3)] == [one_of(clean, i) for i in (2, 3)]
