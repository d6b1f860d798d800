"""Precision of the cache for models that compute in another precision than their weights."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nano_inference.nanochat import Engine
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.gpt import GPT
from tests.nanochat.talkative import VOCAB, CharacterTokenizer
from tests.nanochat.tiny import model_config, state_dict

TOKENIZER = CharacterTokenizer()
PROMPT = [TOKENIZER.get_bos_token_id(), 3, 1, 4, 1, 5]
HEADS, SIZE = 2, 16
DTYPES = (torch.bfloat16, torch.float16)


class StandIn(nn.Module):
    """Upstream's model in one layer: float32 weights, cast in each product to the precision of the activations.

    The first parameter says nothing about that. Writes to the cache by `insert_kv` (2025), or through the views of
    `get_layer_cache` (since 2026-01-11); a cache of another precision fails in the attention.
    """

    def __init__(self, dtype: torch.dtype, *, inserts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inserts, self.dtype = inserts, dtype
        self.config = SimpleNamespace(n_head=HEADS, n_kv_head=HEADS, n_embd=SIZE, n_layer=1, sequence_len=64)
        self.resid_lambdas = nn.Parameter(torch.ones(1))
        self.wte = nn.Embedding(VOCAB, SIZE)
        self.qkv, self.lm_head = nn.Linear(SIZE, 3 * SIZE, bias=False), nn.Linear(SIZE, VOCAB, bias=False)

    def get_device(self) -> torch.device:
        return self.wte.weight.device

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        assert kv_cache is not None
        x = self.wte(ids).to(self.dtype)
        rows = nn.functional.linear(x, self.qkv.weight.to(x.dtype)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in rows)
        end = kv_cache.get_pos() + ids.size(1)
        if self.inserts:
            k, v = kv_cache.insert_kv(0, k, v)
        else:
            for cache, new in zip(kv_cache.get_layer_cache(0), (k, v), strict=True):
                cache[:, end - ids.size(1) : end] = new.transpose(1, 2)
            k, v = (cache[:, :end].transpose(1, 2) for cache in kv_cache.get_layer_cache(0))
            kv_cache.advance(ids.size(1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=ids.size(1) > 1)
        x = x + out.transpose(1, 2).flatten(2)
        return nn.functional.linear(x, self.lm_head.weight.to(x.dtype)).float()


class Wrapper(nn.Module):
    """A model inside another, as torch.compile gives it."""

    def __init__(self, model: StandIn) -> None:
        super().__init__()
        self.inner, self.config = model, model.config
        self.get_device, self.forward = model.get_device, model.forward  # type: ignore[method-assign]


def columns(model: object, dtype: torch.dtype | None = None) -> list[list[int]]:
    engine = Engine(model, TOKENIZER, cache_dtype=dtype)
    return [tokens for tokens, _ in engine.generate(PROMPT, 3, max_tokens=12, temperature=0.8, top_k=20, seed=5)]


@pytest.mark.parametrize("inserts", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_has_precision_of_computation(dtype: torch.dtype, inserts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`COMPUTE_DTYPE` is a constant of the Python module that defines the model, as upstream's nanochat/gpt.py."""
    module = ModuleType("upstreams_gpt")
    module.COMPUTE_DTYPE = dtype  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "upstreams_gpt", module)
    model = type("GPT", (StandIn,), {"__module__": "upstreams_gpt"})(dtype, inserts=inserts)
    wanted = columns(model, dtype)
    assert len(wanted) == 12 and columns(model) == columns(Wrapper(model)) == wanted


def test_compute_dtype_of_the_model_or_its_embedding_is_used() -> None:
    named, plain = StandIn(torch.float16), StandIn(torch.bfloat16)
    named.COMPUTE_DTYPE = torch.float16  # type: ignore[assignment]
    plain.wte.to(torch.bfloat16)
    assert next(plain.parameters()).dtype == torch.float32
    assert len(columns(named)) == len(columns(plain)) == 12


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
