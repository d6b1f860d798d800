"""Reuse by whole blocks: a block is found by the cryptographic chain of its contents (`kv.hashing`)."""

from __future__ import annotations

from collections.abc import Sequence

from nano_inference.checks import check_int
from nano_inference.kv.hashing import compute_block_hash, root_hash
from nano_inference.kv.pool import NO_SALT, AllocationBook, BlockPool, Hit, Salt
from nano_inference.types import CacheAllocation


class PagedKVCache:
    """Owns `num_blocks` blocks of `block_size` tokens; satisfies `KVManager`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        check_int("num_blocks", num_blocks, 1)
        check_int("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Make every block blank and forget every prefix and holder. Can be interrupted and called again."""
        self._pool = BlockPool(self.num_blocks)
        self._book = AllocationBook()
        self._block_of: dict[int, int] = {}
        """Chain hash -> the block that is found by it."""
        self._hash_of: dict[int, int] = {}
        """Block -> its chain hash; also for private duplicates, so that their children can be found."""

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, findable or not."""
        return self._pool.num_free()

    def num_private(self, blocks: Sequence[int]) -> int:
        """How many of these nobody else holds."""
        return sum(self._pool.refs[block] == 1 for block in blocks)

    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """What the cache could give of these tokens, in whole blocks."""
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

    def hold(self, hit: Hit) -> list[int]:
        """Take a reference on a hit's blocks."""
        self._pool.hold(hit.blocks)
        return list(hit.blocks)

    def take(self, count: int) -> list[int]:
        """Take fresh blocks; `CacheFull` leaves no trace."""
        fresh = self._pool.take(count, self._forget)
        for block in fresh:
            self._forget(block)
        return fresh

    def publish(self, tokens: Sequence[int], salt: Salt, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Make the whole blocks of tokens[:end] findable, from block index `start` on; the table stays as it is."""
        size = self.block_size
        chain = self._hash_of.get(blocks[start - 1]) if start else root_hash(*salt)
        if chain is None:  # flushed since: nothing hangs under a forgotten prefix
            return list(blocks)
        for index in range(start, end // size):
            chain = compute_block_hash(tokens[index * size : (index + 1) * size], chain)
            self._hash_of[blocks[index]] = chain
            self._block_of.setdefault(chain, blocks[index])
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back; private duplicates are forgotten."""
        self._pool.release(blocks, self._findable)

    def flush(self) -> int:
        """Forget every prefix; return how many idle blocks became blank."""
        self._block_of.clear()
        self._hash_of.clear()
        return self._pool.blank_idle()

    def allocate(self, token_ids: Sequence[int]) -> CacheAllocation:
        """Give a prompt its blocks, cached ones first; `CacheFull` leaves no trace."""
        hit = self.peek(token_ids, NO_SALT)
        return self._book.open(self, hit, token_ids)

    def deallocate(self, block_ids: Sequence[int], num_computed: int | None = None) -> None:
        """Give a prompt's blocks back, publishing its first `num_computed` tokens (default: all)."""
        tokens = self._book.close(block_ids, num_computed)
        self.release(self.publish(tokens, NO_SALT, block_ids, 0, len(tokens)))

    def check(self) -> None:
        """Raise AssertionError on any lie in the books."""
        self._pool.check()
        for chain, block in self._block_of.items():
            assert self._hash_of[block] == chain
        for block in self._hash_of:
            assert self._pool.refs[block] or self._findable(block)
        assert set(self._pool.idle()) <= set(self._block_of.values())
        assert not set(self._pool.blank()) & self._hash_of.keys()

    def _findable(self, block: int) -> bool:
        chain = self._hash_of.get(block)
        if chain is not None and self._block_of.get(chain) == block:
            return True
        self._hash_of.pop(block, None)
        return False

    def _forget(self, block: int) -> None:
        chain = self._hash_of.pop(block, None)
        if chain is not None and self._block_of.get(chain) == block:
            del self._block_of[chain]
