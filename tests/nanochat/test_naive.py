"""`GPT.generate` and the cost helpers against figures recorded from upstream's model, at its commit 92d63d4.

The recorded model is `tiny.state_dict("G4", model_config("G4"))`, on one thread in float32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nano_inference.nanochat import GPT, Engine
from nano_inference.nanochat.gpt import sample_over_vocabulary
from tests.nanochat.talkative import CharacterTokenizer, Foreign, talkative
from tests.nanochat.tiny import model_config, state_dict

PROMPT = [256, 72, 105]
TOKENIZER = CharacterTokenizer()
RECORDED: list[tuple[float, int | None, int, list[int]]] = [
    (1.0, None, 42, [211, 32, 34, 27, 236, 41, 68, 231, 121, 202, 5, 206]),
    (0.7, 5, 42, [25, 48, 159, 16, 236, 192, 139, 156, 252, 148, 42, 214]),
    (1.3, 50, 7, [179, 177, 111, 197, 224, 242, 252, 126, 68, 136, 96, 253]),
    (1.0, -50, 3, [85, 209, 13, 214, 145, 132, 247, 151, 120, 156, 196, 141]),
    (0.8, 10**6, 1, [169, 245, 25, 214, 104, 110, 249, 13, 124, 214, 25, 168]),
    (-1.0, 3, 5, [253, 83, 175, 83, 175, 83, 175, 44, 83, 175, 83, 175]),
    (0.0, None, 0, [253, 83, 175, 83, 175, 83, 175, 44, 83, 175, 83, 175]),
    (math.inf, None, 9, [168, 169, 49, 21, 264, 113, 43, 98, 238, 46, 154, 239]),
]
"""Temperature, top-k, seed -> upstream's tokens."""
COSTS = [
    (1, 402576, 402576, 1024),
    (7, 408720, 2839536, 7168),
    (64, 467088, 27829248, 65536),
    (200, 551056, 98874496, 149504),
    (256, 565392, 130142208, 163840),
    (1000, 565392, 550793856, 163840),
]
"""Tokens -> upstream's estimate_decode_flops, estimate_prefill_flops and kv_read_bytes."""


@pytest.fixture(scope="module")
def model() -> GPT:
    config = model_config("G4")
    return GPT.from_state_dict(state_dict("G4", config), config)


@pytest.mark.parametrize(("temperature", "top_k", "seed", "expected"), RECORDED)
def test_generate_draws_recorded_tokens(
    model: GPT, temperature: float, top_k: int | None, seed: int, expected: list[int]
) -> None:
    assert list(model.generate(PROMPT, 12, temperature=temperature, top_k=top_k, seed=seed)) == expected


def test_a_call_is_the_forward_of_a_subclass() -> None:
    class Doubled(GPT):
        def forward(self, *given: Any, **named: Any) -> torch.Tensor:
            return 2 * super().forward(*given, **named)

    config = model_config("G4")
    one, ids = Doubled.from_state_dict(state_dict("G4", config), config), torch.tensor([PROMPT])
    assert torch.equal(one(ids), 2 * GPT.forward(one, ids))


def test_generate_ends_at_its_stop_token_and_refuses_what_upstream_refuses(model: GPT) -> None:
    assert list(model.generate(PROMPT, 12, temperature=0.0, stop_token=83)) == [253, 83]
    with pytest.raises(RuntimeError, match="nan"):
        next(model.generate(PROMPT, 1, temperature=math.inf, top_k=3))


def test_candidates_that_tie_with_the_last_are_kept() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    rng = torch.Generator().manual_seed(0)
    assert {int(sample_over_vocabulary(logits, rng, 1.0, 2)) for _ in range(60)} == {0, 1, 2}
    assert {int(sample_over_vocabulary(logits, rng, 1.0, None, 0.2)) for _ in range(60)} == {0}


@pytest.mark.parametrize("num_tokens, decode, prefill, read", COSTS)
def test_costs_equal_recorded_figures(model: GPT, num_tokens: int, decode: int, prefill: int, read: int) -> None:
    assert model.estimate_decode_flops(num_tokens) == decode
    assert model.estimate_prefill_flops(num_tokens) == prefill
    assert model.kv_read_bytes(num_tokens) == read
    assert (model.kv_bytes_per_token(), model.num_matmul_params()) == (1024, 200776)
    assert sum(weight.numel() for weight in model.parameters()) == 241746


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [101.0, 1e31, math.inf])
@pytest.mark.parametrize("options", [{"top_k": -50}, {"top_k": 9}, {"top_p": 0.5}])
def test_engine_accepts_any_temperature_and_top_k(temperature: float, options: dict[str, float]) -> None:
    model, call = talkative("G4"), {"max_tokens": 8, "temperature": temperature, "seed": 3, **options}
    prompt = [TOKENIZER.get_bos_token_id(), 1]
    ours, plain, other = (
        Engine(model, TOKENIZER),
        Engine(Foreign(model), TOKENIZER),
        Engine(model, TOKENIZER, exact=False),
    )
    found, expected, inexact = (one.generate_batch(prompt, 4, **call) for one in (ours, plain, other))  # type: ignore[arg-type]
    assert found == expected
    assert all(any(len(row) > len(prompt) for row in rows) for rows, _ in (found, inexact))


def test_infinite_temperature_draws_uniformly() -> None:
    model = talkative("G4")
    prompt = [TOKENIZER.get_bos_token_id(), 1]
    columns = list(Engine(model, TOKENIZER).generate(prompt, 64, max_tokens=1, temperature=math.inf, top_k=-50))
    rng = torch.Generator().manual_seed(42)
    expected = torch.multinomial(
        torch.full((64, model.config.vocab_size), 1 / model.config.vocab_size), 1, generator=rng
    )
    assert columns[0][0] == expected[:, 0].tolist()
