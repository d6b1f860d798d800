"""`KVCache` by the interfaces of 2025 and of today, and an engine's rows on a model that uses the old one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nano_inference.nanochat import Engine, KVCache
from nano_inference.nanochat.gpt import GPT
from tests.nanochat.talkative import VOCAB, CharacterTokenizer
from tests.nanochat.tiny import model_config, state_dict

LAYERS, ROWS, HEADS, SIZE = 3, 2, 4, 6


def insert(cache: KVCache, value: float, num_tokens: int = 1) -> None:
    """Append tokens whose keys and values identify layer and token."""
    for layer in range(LAYERS):
        keys = torch.full((ROWS, HEADS, num_tokens, SIZE), value + 0.1 * layer)
        k, v = cache.insert_kv(layer, keys, -keys)
        assert torch.equal(k[:, :, -num_tokens:], keys) and torch.equal(v[:, :, -num_tokens:], -keys)


def test_growth_keeps_keys_and_values_of_every_layer() -> None:
    """Growth mixed up layers in upstream once (its pull request 186)."""
    cache = KVCache(batch_size=ROWS, num_heads=HEADS, seq_len=3, head_dim=SIZE, num_layers=LAYERS)
    assert cache.kv_cache is None and cache.kv_shape == (LAYERS, 2, ROWS, HEADS, 3, SIZE) and cache.pos == 0
    for value in range(4):
        insert(cache, value)
    assert cache.kv_cache is not None and cache.pos == 4
    assert cache.kv_shape == tuple(cache.kv_cache.shape) == (LAYERS, 2, ROWS, HEADS, 2048, SIZE)
    for layer in range(LAYERS):
        for value in range(4):
            assert torch.allclose(cache.kv_cache[layer, 0, :, :, value], torch.tensor(value + 0.1 * layer))
            assert torch.allclose(cache.kv_cache[layer, 1, :, :, value], torch.tensor(-value - 0.1 * layer))
    cache.advance(2048)  # upstream's only counts
    assert cache.get_pos() == 2052 and cache.max_seq_len == 4096
    short = KVCache(1, 1, 2, 1, 1, dtype=torch.bfloat16)
    for position in range(5):
        short.get_layer_cache(0)[0][:, position] = position
        short.advance(1)
    assert short.k_cache[0, 0, :5, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_both_interfaces_share_memory_and_position() -> None:
    cache = KVCache(ROWS, HEADS, 8, SIZE, LAYERS, "cpu", torch.float32)
    assert cache.k_cache.shape == (LAYERS, ROWS, 8, HEADS, SIZE) and cache.cache_seqlens.dtype == torch.int32
    insert(cache, 5, num_tokens=2)
    assert cache.kv_cache is not None
    cache.kv_cache[1, 0, 0, 3, 1] = 9.0
    assert cache.k_cache[1, 0, 1, 3].tolist() == [9.0] * SIZE == cache.get_layer_cache(1)[0][0, 1, 3].tolist()
    cache.pos = 1
    assert cache.cache_seqlens.tolist() == [1] * ROWS
    insert(cache, 7)
    assert float(cache.v_cache[0, 0, 1, 0, 0]) == -7.0 and cache.pos == 2
    cache.prev_embedding = torch.ones(2, 1, 5)
    cache.reset()
    assert cache.pos == 0 and cache.kv_cache is not None and cache.prev_embedding is None
    keys = torch.randn(LAYERS, ROWS, 8, HEADS, SIZE)
    cache.k_cache, cache.v_cache = keys, -keys
    assert torch.equal(cache.get_layer_cache(1)[0], keys[1]) and torch.equal(cache.v_cache, -keys)
    for other in (keys[:, :, :2], keys.bfloat16()):
        with pytest.raises(ValueError, match="k_cache: must be"):
            cache.k_cache = other


def test_prefill_copies_one_row_and_checks_shapes() -> None:
    prompt = KVCache(1, 2, 4, 3, 2, "cpu", torch.float32)
    prompt.k_cache.normal_()
    prompt.advance(3)
    prompt.prev_embedding = torch.randn(1, 1, 6)
    cache = KVCache(5, 2, 9, 3, 2, "cpu", torch.float32)
    cache.prefill(prompt)
    assert torch.equal(cache.k_cache[:, :, :3], prompt.k_cache[:, :, :3].expand(2, 5, 3, 2, 3))
    assert cache.cache_seqlens.tolist() == [3] * 5 and cache.kv_cache is not None
    assert cache.prev_embedding is not None and cache.prev_embedding.shape == (5, 1, 6)
    with pytest.raises(AssertionError, match="Cannot prefill a non-empty KV cache"):
        cache.prefill(prompt)
    for wrong in ((5, 2, 3, 3, 2), (5, 1, 9, 3, 2), (5, 2, 9, 4, 2), (5, 2, 9, 3, 1)):
        with pytest.raises(AssertionError, match="KV cache"):
            KVCache(*wrong).prefill(prompt)
    for other in (KVCache(2, 2, 9, 3, 2), None):
        with pytest.raises(AssertionError, match="KV cache"):
            KVCache(3, 2, 9, 3, 2).prefill(other)


class Inserting:
    """A model that finds every token equally likely and inserts keys by `insert_kv`."""

    config = SimpleNamespace(n_kv_head=HEADS, n_head=HEADS, n_embd=HEADS * SIZE, n_layer=2, sequence_len=32)

    def get_device(self) -> str:
        return "cpu"

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        assert kv_cache is not None
        for layer in range(2):
            keys = torch.zeros(ids.size(0), HEADS, ids.size(1), SIZE)
            kv_cache.insert_kv(layer, keys, keys)
        return torch.zeros(*ids.shape, VOCAB)


def test_samples_have_their_own_first_token() -> None:
    """Upstream sampled one for all rows until its commit 8f979a8."""
    tokenizer = CharacterTokenizer()
    prompt = [tokenizer.get_bos_token_id(), 1, 2]
    columns = list(Engine(Inserting(), tokenizer).generate(prompt, num_samples=16, max_tokens=1))
    assert len(columns) == 1 and len(set(columns[0][0])) > 4 and columns[0][1] == [1] * 16


TOKENIZER = CharacterTokenizer()
PROMPT = [TOKENIZER.get_bos_token_id(), 3, 1, 4, 1, 5]
NUM_HEADS, WIDTH = 2, 16
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
        self.config = SimpleNamespace(n_head=NUM_HEADS, n_kv_head=NUM_HEADS, n_embd=WIDTH, n_layer=1, sequence_len=64)
        self.resid_lambdas = nn.Parameter(torch.ones(1))
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.lm_head = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)

    def get_device(self) -> torch.device:
        return self.wte.weight.device

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        assert kv_cache is not None
        x = self.wte(ids).to(self.dtype)
        rows = nn.functional.linear(x, self.qkv.weight.to(x.dtype)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in rows)
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
