"""KV caches for programs without an engine: a prompt in, a block table out. The engine uses their base classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from nano_inference import kv
from nano_inference.checks import check_int
from nano_inference.first_names import Block
from nano_inference.kv import KVManager, Salt
from nano_inference.types import CacheFull

_NO_SALT: Salt = (0, "")


class CacheAllocation(NamedTuple):
    """A prompt's blocks; the K/V of its first `cached_length` tokens exists."""

    block_ids: tuple[int, ...]
    cached_length: int


@runtime_checkable
class KVCacheManager(Protocol):
    """The minimal interface of a cache, also for `isinstance`: an object with the four methods, whatever its class."""

    def allocate(self, token_ids: Sequence[int]) -> CacheAllocation: ...

    def deallocate(self, block_ids: Sequence[int], num_computed: int | None = None) -> None: ...

    def num_free_blocks(self) -> int: ...

    def flush(self) -> int: ...


class PromptCache(KVManager):
    """Adds whole prompts to a cache: owns which blocks belong to which prompt until they are released."""

    def reset(self) -> None:
        super().reset()
        self._allocated: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """The last block of each `allocate`, which is private -> its blocks and the prompt's tokens."""

    def allocate(self, token_ids: Sequence[int]) -> CacheAllocation:
        """Return a prompt's blocks, whole cached ones first. Raises `CacheFull` and then changes nothing."""
        hit = self.peek(token_ids, _NO_SALT)
        if not token_ids:
            raise ValueError("token_ids must hold at least one token")
        num_fresh = -(-len(token_ids) // self.block_size) - len(hit.blocks)
        if num_fresh + hit.num_idle > self.num_free_blocks():
            raise CacheFull(f"{num_fresh + hit.num_idle} KV blocks requested, {self.num_free_blocks()} are free")
        blocks = self.hold(hit) + self.take(num_fresh)
        self._allocated[blocks[-1]] = tuple(blocks), tuple(token_ids)
        return CacheAllocation(tuple(blocks), len(hit.blocks) * self.block_size)

    def share(self, block_ids: Sequence[int], num_computed: int | None = None) -> tuple[int, ...]:
        """Publish a prompt's first `num_computed` tokens (default: all), while its owner holds it.

        Returns the owner's blocks from now on: some may be replaced by equal ones. Raises as `deallocate` does.
        """
        tokens = self._taken(block_ids, num_computed)
        computed = tokens[:num_computed]
        blocks = tuple(self.publish(computed, _NO_SALT, block_ids, 0, len(computed)))
        self._allocated[blocks[-1]] = blocks, tokens
        return blocks

    def deallocate(self, block_ids: Sequence[int], num_computed: int | None = None) -> None:
        """Release a prompt's blocks and publish its first `num_computed` tokens (default: all).

        Raises `ValueError` when the blocks were not allocated, or were deallocated before.
        """
        computed = self._taken(block_ids, num_computed)[:num_computed]
        self.release(self.publish(computed, _NO_SALT, block_ids, 0, len(computed)))

    def _taken(self, block_ids: Sequence[int], num_computed: int | None) -> tuple[int, ...]:
        """Forget that the blocks are allocated; return their tokens."""
        blocks, tokens = self._allocated.get(block_ids[-1], ((), ())) if block_ids else ((), ())
        if not blocks or tuple(block_ids) != blocks:
            raise ValueError("block_ids were not allocated, or were deallocated already")
        if num_computed is not None:
            check_int("num_computed", num_computed, 0, len(tokens))
        del self._allocated[blocks[-1]]
        return tokens


class PagedKVCache(PromptCache, kv.PagedKVCache):
    """Owns `num_blocks` blocks of `block_size` tokens. Its properties are snapshots."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in order of their ids."""
        return tuple(Block(one, count, self._hash_of.get(one)) for one, count in enumerate(self._pool.refs))

    @property
    def hash_to_block(self) -> Mapping[int, int]:
        """Maps the hash of each block that can be found to its id; the first block's prefix is a hash of its salt."""
        return dict(self._block_of)

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        """Blocks without a holder, cached ones included."""
        return tuple(one.block_id for one in self.blocks if not one.ref_count)


class RadixKVCache(PromptCache, kv.RadixKVCache):
    """The tree of published blocks; see `KVManager`."""


RadixAttention = RadixKVCache
"""SGLang's name for prefix reuse by a tree of tokens."""
