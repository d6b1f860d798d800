"""`KVCache` by the interfaces of 2025 and of today, and an engine's rows on a model that uses the old one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nano_inference.nanochat import Engine, KVCache
from tests.nanochat.talkative import VOCAB, CharacterTokenizer

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
