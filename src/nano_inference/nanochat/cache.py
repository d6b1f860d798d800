"""`KVCache`: the dense cache of nanochat's loop, for models with their own forward pass.

It has both interfaces of upstream: `k_cache`, `get_layer_cache` and `advance` of today on (B, T, H, D), and `kv_cache`,
`kv_shape`, `pos` and `insert_kv` of 2025 on (B, H, T, D), all of the same memory. It grows where upstream now drops a
token that does not fit, by as much as upstream did in 2025.

Shapes: L layers, B rows, T positions, H kv heads, D head size, E embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 1024  # positions beyond those needed when the cache grows; its size is then rounded up to a multiple


class KVCache:
    """Owns the keys and values of B rows with a common position, for one call of `generate`."""

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        seq_len: int,
        head_dim: int,
        num_layers: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate `seq_len` positions; `num_heads` counts kv heads. (Callers of 2025 pass no device and no dtype.)"""
        self.batch_size = batch_size
        self.max_seq_len = seq_len
        self.n_layers = num_layers
        self.n_heads = num_heads
        self.head_dim = head_dim
        shape = (num_layers, 2, batch_size, seq_len, num_heads, head_dim)
        self._data = torch.zeros(shape, device=device, dtype=dtype)
        self._is_used = False
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.prev_embedding: Tensor | None = None  # the last token's embedding (B, 1, E), for models with a smear gate
        self.prev_token: Tensor | None = None  # the last token's id (B, 1), for `GPT.forward`

    @property
    def k_cache(self) -> Tensor:
        """The keys of all layers, (L, B, T, H, D). Assignment copies values. Raises `ValueError` for another shape."""
        return self._data[:, 0]

    @k_cache.setter
    def k_cache(self, values: Tensor) -> None:
        self._assign("k_cache", self.k_cache, values)

    @property
    def v_cache(self) -> Tensor:
        """The values of all layers, as `k_cache`."""
        return self._data[:, 1]

    @v_cache.setter
    def v_cache(self, values: Tensor) -> None:
        self._assign("v_cache", self.v_cache, values)

    def _assign(self, name: str, cache: Tensor, values: Tensor) -> None:
        if values.shape != cache.shape or values.dtype != cache.dtype:
            wanted, got = ((tuple(one.shape), one.dtype) for one in (cache, values))
            raise ValueError(f"{name}: must be {wanted} as the cache, got {got}")
        cache.copy_(values)
        self._is_used = True

    @property
    def kv_cache(self) -> Tensor | None:
        """Keys and values, (L, 2, B, H, T, D); None before the first ones. The interface of 2025."""
        return self._data.transpose(3, 4) if self._is_used else None

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of `kv_cache`."""
        return tuple(self._data.transpose(3, 4).shape)

    @property
    def pos(self) -> int:
        """The number of filled positions; can be set. The interface of 2025."""
        return self.get_pos()

    @pos.setter
    def pos(self, position: int) -> None:
        self.cache_seqlens.fill_(position)

    def reset(self) -> None:
        """Set the position to 0; stored keys and values are overwritten later."""
        self.cache_seqlens.zero_()
        self.prev_embedding = None
        self.prev_token = None

    def get_pos(self) -> int:
        """Return the number of filled positions, equal for all rows."""
        return int(self.cache_seqlens[0])

    def advance(self, num_tokens: int) -> None:
        """Advance by tokens that were written to every layer; grow past the end, where upstream only counts."""
        self.grow(num_tokens)
        self.cache_seqlens += num_tokens
        self._is_used = True

    def get_layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return writable views (B, T, H, D) of a layer's keys and values; grow first if the cache is full."""
        if self.get_pos() >= self.max_seq_len:
            self.grow(1)
        return self.k_cache[layer], self.v_cache[layer]

    def grow(self, num_tokens: int) -> None:
        """Allocate room for `num_tokens` more tokens and 1024 others, rounded up to a multiple of 1024 positions."""
        wanted = self.get_pos() + num_tokens
        if wanted <= self.max_seq_len:
            return
        old = self._data
        self.max_seq_len = -(-(wanted + GROWTH) // GROWTH) * GROWTH
        self._data = old.new_zeros(*old.shape[:3], self.max_seq_len, *old.shape[4:])
        self._data[:, :, :, : old.size(3)] = old

    def insert_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H, T, D) of one layer; return all of that layer in the same layout.

        Advances after the last layer. The first keys determine the precision.
        """
        num_tokens, pos = k.size(2), self.get_pos()
        if pos == 0:
            self._data = self._data.to(k.dtype)
        self.grow(num_tokens)
        self._is_used = True
        end = pos + num_tokens
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache[layer, :, pos:end] = new.transpose(1, 2)
        if layer == self.n_layers - 1:
            self.advance(num_tokens)
        k_BTHD, v_BTHD = self.k_cache[layer, :, :end], self.v_cache[layer, :, :end]
        return k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2)

    def prefill(self, other: KVCache | None) -> None:
        """Copy the filled positions and the precision of another cache; a single row is copied to all rows.

        Raises `AssertionError`, as upstream, if this cache is not empty or too short, or if the shapes differ.
        """
        assert other is not None, "KV cache: the cache to prefill from is None"
        assert self.get_pos() == 0, "Cannot prefill a non-empty KV cache"
        for name in ("n_layers", "n_heads", "head_dim"):
            ours, theirs = getattr(self, name), getattr(other, name)
            assert ours == theirs, f"KV cache: {name} is {ours}, the other cache has {theirs}"
        assert other.batch_size in (1, self.batch_size), (
            f"KV cache: {other.batch_size} rows cannot fill {self.batch_size}"
        )
        pos = other.get_pos()
        assert self.max_seq_len >= other.max_seq_len, (
            f"KV cache: {self.max_seq_len} positions are fewer than the other cache's {other.max_seq_len}"
        )
        self._data = self._data.to(other.k_cache.dtype)
        self.k_cache[:, :, :pos] = other.k_cache[:, :, :pos]
        self.v_cache[:, :, :pos] = other.v_cache[:, :, :pos]
        self._is_used = True
        self.cache_seqlens.fill_(pos)
        for name in ("prev_embedding", "prev_token"):
            state = getattr(other, name)
            setattr(self, name, None if state is None else state.expand(self.batch_size, *state.shape[1:]).clone())
