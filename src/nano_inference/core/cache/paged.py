"""Prefix reuse by whole blocks: a block is found by the hash chain of its tokens (`core.cache.hashing`)."""

from __future__ import annotations

from collections.abc import Sequence

from nano_inference.core.cache.hashing import compute_block_hash, root_hash
from nano_inference.core.cache.pool import Hit, KVManager, Salt


class PagedKVCache(KVManager):
    """Owns `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)  # without states, whose prefixes end inside blocks

    def _forget_all(self) -> None:
        self._block_of: dict[int, int] = {}  # chain hash -> the published block
        self._hash_of: dict[int, int] = {}
        """Block -> its chain hash; also for private duplicates, so that their children can be found."""

    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """Return the whole blocks that these tokens can reuse."""
        found = []
        chain = root_hash(*salt)
        size = self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            chain = compute_block_hash(tokens[start : start + size], chain)
            block = self._block_of.get(chain)
            if block is None:
                break
            found.append(block)
        return Hit(tuple(found), sum(not self._pool.refs[block] for block in found))

    def publish(self, tokens: Sequence[int], salt: Salt, blocks: list[int], start: int, end: int) -> list[int]:
        """Make the whole blocks of tokens[:end] findable, from block index `start` on; return `blocks` unchanged."""
        size = self.block_size
        chain = self._hash_of.get(blocks[start - 1]) if start else root_hash(*salt)
        if chain is None:  # the prefix was flushed, so its continuations cannot be found either
            return blocks
        for index in range(start, end // size):
            chain = compute_block_hash(tokens[index * size : (index + 1) * size], chain)
            self._hash_of[blocks[index]] = chain
            self._block_of.setdefault(chain, blocks[index])
        return blocks

    def check(self) -> None:
        self._pool.check()
        self.states.check()
        for chain, block in self._block_of.items():
            assert self._hash_of[block] == chain
        for block in self._hash_of:
            assert self._pool.refs[block] or self._keep_or_forget(block)
        assert set(self._pool.idle()) <= set(self._block_of.values())
        assert not set(self._pool.blank()) & self._hash_of.keys()

    def _keep_or_forget(self, block: int) -> bool:
        """Return whether the block is the published one of its hash; forget the hash of a duplicate."""
        chain = self._hash_of.get(block)
        if chain is not None and self._block_of.get(chain) == block:
            return True
        self._hash_of.pop(block, None)
        return False

    def _forget(self, block: int) -> None:
        chain = self._hash_of.pop(block, None)
        if chain is not None and self._block_of.get(chain) == block:
            del self._block_of[chain]
