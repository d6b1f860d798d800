"""Precision of the cache for models that compute in another precision than their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nano_inference.nanochat import Engine
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.gpt import GPT
from tests.nanochat import upstream_bfloat16, upstream_float16
from tests.nanochat.talkative import CharacterTokenizer
from tests.nanochat.tiny import model_config, state_dict
from tests.nanochat.upstream import StandIn

TOKENIZER = CharacterTokenizer()
PROMPT = [TOKENIZER.get_bos_token_id(), 3, 1, 4, 1, 5]
MODELS: dict[torch.dtype, Callable[..., StandIn]] = {
    torch.bfloat16: upstream_bfloat16.GPT,
    torch.float16: upstream_float16.GPT,
}


class Wrapper(nn.Module):
    """A model inside another, as torch.compile gives it."""

    def __init__(self, model: StandIn) -> None:
        super().__init__()
        self.inner = model
        self.config = model.config

    def get_device(self) -> torch.device:
        return self.inner.get_device()

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        return self.inner.forward(ids, kv_cache)


def columns(model: object, dtype: torch.dtype | None = None) -> list[list[int]]:
    engine = Engine(model, TOKENIZER, cache_dtype=dtype)
    return [tokens for tokens, _ in engine.generate(PROMPT, 3, max_tokens=12, temperature=0.8, top_k=20, seed=5)]


@pytest.mark.parametrize("inserts", [True, False])
@pytest.mark.parametrize("dtype", MODELS)
def test_cache_has_precision_of_computation(dtype: torch.dtype, inserts: bool) -> None:
    model = MODELS[dtype](inserts=inserts)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    wanted = columns(model, dtype)
    assert len(wanted) == 12
    assert columns(model) == wanted
    assert columns(Wrapper(model)) == wanted


@pytest.mark.parametrize("dtype", MODELS)
def test_compute_dtype_of_model_is_used(dtype: torch.dtype) -> None:
    class Named(StandIn):
        COMPUTE_DTYPE = dtype

    assert len(columns(Named(dtype, inserts=False))) == 12


def test_embedding_dtype_is_used_without_compute_dtype() -> None:
    model = StandIn(torch.bfloat16, inserts=False)
    model.wte.to(torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float32
    assert len(columns(model)) == 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_plain_model_accepts_cache_of_other_precision(dtype: str) -> None:
    config = model_config("G4")
    gpt = GPT.from_state_dict(state_dict("G4", config), config, device="cpu", dtype=dtype)  # type: ignore[arg-type]
    ids = torch.tensor([[1, 2, 3]])
    found = []
    for kind in (torch.float32, getattr(torch, dtype)):
        cache = KVCache(1, 2, 8, 16, 4, "cpu", kind)
        gpt.forward(ids, kv_cache=cache)
        found.append(gpt.forward(ids[:, -1:], kv_cache=cache))
        assert cache.k_cache.dtype == getattr(torch, dtype)
    assert torch.equal(*found)
