"""`KVCache` by the interface of October 2025 to January 2026, and an engine's rows on a model that uses it.

Both behaviours were bugs of upstream once: growth mixed up layers (its pull request 186), and the first token of a
prompt was sampled once for all rows (fixed in its commit 8f979a8).
"""

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
        cache.insert_kv(layer, keys, -keys)


def test_growth_keeps_keys_and_values_of_every_layer() -> None:
    cache = KVCache(batch_size=ROWS, num_heads=HEADS, seq_len=3, head_dim=SIZE, num_layers=LAYERS)
    assert cache.kv_cache is None and cache.kv_shape == (LAYERS, 2, ROWS, HEADS, 3, SIZE) and cache.pos == 0
    for value in range(3):
        insert(cache, value)
    assert cache.kv_cache is not None and cache.kv_cache.shape == cache.kv_shape
    before = cache.kv_cache.clone()
    insert(cache, 3)
    assert cache.kv_shape == tuple(cache.kv_cache.shape) == (LAYERS, 2, ROWS, HEADS, 2048, SIZE) and cache.pos == 4
    assert torch.equal(cache.kv_cache[..., :3, :], before)
    for layer in range(LAYERS):
        for value in range(4):
            assert torch.allclose(cache.kv_cache[layer, 0, :, :, value], torch.tensor(value + 0.1 * layer))
            assert torch.allclose(cache.kv_cache[layer, 1, :, :, value], torch.tensor(-value - 0.1 * layer))


def test_both_interfaces_share_memory_and_position() -> None:
    cache = KVCache(ROWS, HEADS, 8, SIZE, LAYERS, "cpu", torch.float32)
    insert(cache, 5, num_tokens=2)
    assert cache.kv_cache is not None
    cache.kv_cache[1, 0, 0, 3, 1] = 9.0
    assert cache.k_cache[1, 0, 1, 3].tolist() == [9.0] * SIZE == cache.get_layer_cache(1)[0][0, 1, 3].tolist()
    cache.pos = 1
    assert cache.cache_seqlens.tolist() == [1] * ROWS
    insert(cache, 7)
    assert float(cache.v_cache[0, 0, 1, 0, 0]) == -7.0 and cache.pos == 2
    cache.reset()
    assert cache.pos == 0 and cache.kv_cache is not None


def test_prefill_counts_as_use() -> None:
    prompt = KVCache(1, HEADS, 4, SIZE, LAYERS)
    prompt.advance(2)
    cache = KVCache(ROWS, HEADS, 9, SIZE, LAYERS)
    cache.prefill(prompt)
    assert cache.pos == 2 and cache.kv_cache is not None and cache.kv_cache.shape[2] == ROWS


class Inserting:
    """A model that finds every token equally likely and inserts keys by `insert_kv`."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(n_kv_head=HEADS, n_head=HEADS, n_embd=HEADS * SIZE, n_layer=2, sequence_len=32)

    def get_device(self) -> str:
        return "cpu"

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        assert kv_cache is not None
        for layer in range(2):
            keys = torch.zeros(ids.size(0), HEADS, ids.size(1), SIZE)
            kv_cache.insert_kv(layer, keys, keys)
        return torch.zeros(*ids.shape, VOCAB)


@pytest.mark.parametrize("seed", [0, 42])
def test_samples_have_their_own_first_token(seed: int) -> None:
    tokenizer = CharacterTokenizer()
    prompt = [tokenizer.get_bos_token_id(), 1, 2]
    columns = list(Engine(Inserting(), tokenizer).generate(prompt, num_samples=16, max_tokens=1, seed=seed))
    assert len(columns) == 1 and len(set(columns[0][0])) > 4 and columns[0][1] == [1] * 16
