"""A stand-in for upstream's model: float32 weights, cast in each product to the precision of the activations.

It calls the cache in either of the ways that upstream's models have had: `insert_kv` (2025), and views of
`get_layer_cache` that attention writes and reads itself (since 2026-01-11).

Shapes: B rows, T tokens, S keys, H heads, D head size.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_inference.nanochat.cache import KVCache
from tests.nanochat.talkative import VOCAB

_LAYERS, _HEADS, _SIZE = 2, 2, 16


class Cast(nn.Linear):
    """A product in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        return functional.linear(x, self.weight.to(x.dtype))


class StandIn(nn.Module):
    """A model whose first parameter says nothing about its computation, as upstream's since January 2026."""

    def __init__(self, dtype: torch.dtype, *, inserts: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inserts = inserts
        self.dtype = dtype
        self.config = SimpleNamespace(
            n_head=_HEADS, n_kv_head=_HEADS, n_embd=_SIZE, n_layer=_LAYERS, sequence_len=64, vocab_size=VOCAB
        )
        self.resid_lambdas = nn.Parameter(torch.ones(_LAYERS))
        self.wte = nn.Embedding(VOCAB, _SIZE)
        self.qkv = nn.ModuleList(Cast(_SIZE, 3 * _SIZE, bias=False) for _ in range(_LAYERS))
        self.lm_head = Cast(_SIZE, VOCAB, bias=False)

    def get_device(self) -> torch.device:
        """Return where the weights are."""
        return self.wte.weight.device

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        """Return float32 logits."""
        assert kv_cache is not None
        x = self.wte(ids).to(self.dtype)
        start = kv_cache.get_pos()
        for layer, qkv in enumerate(self.qkv):
            q, k, v = (part.unflatten(-1, (_HEADS, -1)) for part in qkv(x).chunk(3, dim=-1))
            x = x * self.resid_lambdas[layer].to(self.dtype) + self._attend(q, k, v, layer, start, kv_cache).flatten(2)
        if not self.inserts:
            kv_cache.advance(ids.size(1))
        return self.lm_head(x).float()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, start: int, cache: KVCache) -> Tensor:
        if self.inserts:
            k_BHSD, v_BHSD = cache.insert_kv(layer, k.transpose(1, 2), v.transpose(1, 2))
        else:
            k_all, v_all = cache.get_layer_cache(layer)
            end = start + q.size(1)
            k_all[:, start:end], v_all[:, start:end] = k, v
            k_BHSD, v_BHSD = k_all[:, :end].transpose(1, 2), v_all[:, :end].transpose(1, 2)
        q_BHTD = q.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, is_causal=q.size(1) > 1)
        return out.transpose(1, 2)
