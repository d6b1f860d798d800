"""Which KV blocks hold what: integers only, the bytes are the executors'.

One contract, two managers. `paged` finds whole blocks by a cryptographic chain of their contents; `radix` keeps a tree
of the tokens themselves, so that a hit may end inside a block. Rules that both keep, and `check()` verifies:

- a block becomes findable only after its K/V exists (`publish`), and never under another salt than its own;
- at least one token of a prompt is left to compute;
- a live block table never changes: whoever computes what another already published keeps a private copy;
- every hold of a step comes before any take, since a take may evict what nobody holds;
- a taking or holding that cannot be done whole leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nano_inference.config import CacheType
from nano_inference.kv.hashing import compute_block_hash
from nano_inference.kv.paged import PagedKVCache
from nano_inference.kv.pool import Hit, Salt
from nano_inference.kv.radix import RadixKVCache
from nano_inference.types import CacheAllocation

__all__ = [
    "Hit",
    "KVCacheManager",
    "KVManager",
    "PagedKVCache",
    "RadixKVCache",
    "Salt",
    "compute_block_hash",
    "make_kv",
]


class KVCacheManager(Protocol):
    """The thin public face: whole prompts in, block tables out."""

    def allocate(self, token_ids: Sequence[int]) -> CacheAllocation:
        """Give a prompt its blocks, cached ones first; `CacheFull` leaves no trace."""

    def deallocate(self, block_ids: Sequence[int], num_computed: int | None = None) -> None:
        """Give the blocks back; their first `num_computed` tokens (default: all) have K/V worth finding again."""

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, findable or not."""

    def flush(self) -> int:
        """Forget every prefix; return how many idle blocks became blank. Held blocks die when released."""


class KVManager(KVCacheManager, Protocol):
    """What the engine uses."""

    num_blocks: int
    block_size: int

    def reset(self) -> None:
        """Make every block blank and forget every prefix and holder. Can be interrupted and called again."""

    def num_private(self, blocks: Sequence[int]) -> int:
        """How many of these nobody else holds."""

    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """What the cache could give of these tokens. Reads only; leaves at least one token to compute."""

    def hold(self, hit: Hit) -> list[int]:
        """Take a reference on a hit's whole blocks and return them as the start of a block table."""

    def take(self, count: int) -> list[int]:
        """Take fresh blocks, evicting the least recently released; `CacheFull` leaves no trace."""

    def publish(self, tokens: Sequence[int], salt: Salt, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Make K/V of tokens[:end] findable; whole blocks before index `start` were published by an earlier call.

        Returns the block table to go on with: where another's block already says the same, it may stand in for ours,
        which is then given back.
        """

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back, tails first, so that a prefix outlives its endings."""

    def check(self) -> None:
        """Walk everything and raise AssertionError on any lie."""


def make_kv(cache_type: CacheType, num_blocks: int, block_size: int) -> KVManager:
    """Return a fresh manager of the named kind."""
    if cache_type == "paged":
        return PagedKVCache(num_blocks, block_size)
    return RadixKVCache(num_blocks, block_size)
