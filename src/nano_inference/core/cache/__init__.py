"""KV block bookkeeping: which block holds which tokens. Integers only; executors own the memory.

`paged` finds whole blocks by a hash chain over their tokens; `radix` keeps a tree of the tokens, so that a hit may end
inside a block. Invariants of both, verified by `check()`:

- a block can be found only after its K/V exists (`publish`), and only under its own salt;
- a hit leaves at least one token of a prompt to compute;
- `paged` never changes a block table in use: a sequence that computes K/V which is already published keeps a private
  copy; `radix` replaces a full block by the published equal one, between steps (`publish` returns the table);
- within a step every `hold` precedes every `take`, because `take` may evict blocks without references;
- `take` and `hold` change either everything or nothing;
- a snapshot of a recurrent state (`states`) is found exactly as long as the K/V of its tokens.
"""

from __future__ import annotations

from nano_inference.config import CacheType
from nano_inference.core.cache.hashing import compute_block_hash as compute_block_hash
from nano_inference.core.cache.paged import PagedKVCache as PagedKVCache
from nano_inference.core.cache.pool import Hit as Hit
from nano_inference.core.cache.pool import KVManager as KVManager
from nano_inference.core.cache.pool import Salt as Salt
from nano_inference.core.cache.radix import RadixKVCache as RadixKVCache
from nano_inference.core.cache.states import StatePool as StatePool


def make_kv(cache_type: CacheType, num_blocks: int, block_size: int, num_states: int = 0) -> KVManager:
    """Return a new, empty manager of the given type. Raises `ValueError` for a paged one with recurrent states."""
    if cache_type == "radix":
        return RadixKVCache(num_blocks, block_size, num_states)
    if num_states:
        raise ValueError("cache_type: the model keeps recurrent states, which 'paged' does not support; use 'radix'")
    return PagedKVCache(num_blocks, block_size)
