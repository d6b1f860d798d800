"""Reference counts, and the two kinds of free block: blank ones, and idle ones whose K/V can still be found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from nano_inference.checks import check_int
from nano_inference.types import CacheAllocation, CacheFull

Salt = tuple[int, str]
"""Weight version and cache namespace: prefixes are shared only within one."""

NO_SALT: Salt = (0, "")


class Hit(NamedTuple):
    """What a cache could give of a prompt."""

    blocks: tuple[int, ...] = ()
    """Whole blocks, to be shared."""
    num_idle: int = 0
    """How many of them would leave the free list."""
    partial_block: int = -1
    """A block whose first `partial_tokens` slots continue the prefix; to be copied, never shared. -1 is none."""
    partial_tokens: int = 0


class BlockPool:
    """Owns the counts of a fixed number of blocks. Idle blocks are evicted least recently released first."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._idle)

    def idle(self) -> tuple[int, ...]:
        """Findable blocks that nobody holds, the next to be evicted first."""
        return tuple(self._idle)

    def blank(self) -> tuple[int, ...]:
        """Blocks that nobody holds or can find."""
        return tuple(self._blank)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each."""
        for block in blocks:
            if not self.refs[block]:
                del self._idle[block]
            self.refs[block] += 1

    def take(self, count: int, forget: Callable[[int], None]) -> list[int]:
        """Take blank blocks, and when they run out evict idle ones, telling `forget` of each."""
        if count > self.num_free():
            raise CacheFull(f"{count} KV blocks asked for, {self.num_free()} of {len(self.refs)} are free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = self._idle.popitem(last=False)[0]
                forget(block)
            self.refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int], findable: Callable[[int], bool]) -> None:
        """Give one reference back on each, last block first."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if findable(block):
                self._idle[block] = None
            else:
                self._blank.append(block)

    def blank_idle(self) -> int:
        """Make every idle block blank; return how many there were."""
        count = len(self._idle)
        self._blank.extend(self._idle)
        self._idle.clear()
        return count

    def check(self) -> None:
        """Raise AssertionError unless every block is held, idle or blank, and just one of them."""
        held = {block for block, count in enumerate(self.refs) if count}
        blank = set(self._blank)
        assert all(count >= 0 for count in self.refs)
        assert len(blank) == len(self._blank)
        assert not held & blank and not held & self._idle.keys() and not blank & self._idle.keys()
        assert len(held) + len(blank) + len(self._idle) == len(self.refs)


class BlockHolder(Protocol):
    """What the book needs of a manager."""

    block_size: int

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""

    def hold(self, hit: Hit) -> list[int]:
        """Take a reference on a hit's whole blocks."""

    def take(self, count: int) -> list[int]:
        """Take fresh blocks."""


class AllocationBook:
    """Remembers what `allocate` gave out, so that `deallocate` can publish it. Keyed by the last, private, block."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def open(self, kv: BlockHolder, hit: Hit, token_ids: Sequence[int]) -> CacheAllocation:
        """Hold a hit's blocks, take the rest of the prompt's, and note its tokens; all or nothing."""
        if not token_ids:
            raise ValueError("token_ids must hold at least one token")
        num_fresh = -(-len(token_ids) // kv.block_size) - len(hit.blocks)
        if num_fresh + hit.num_idle > kv.num_free_blocks():
            raise CacheFull(f"{num_fresh + hit.num_idle} KV blocks asked for, {kv.num_free_blocks()} are free")
        blocks = kv.hold(hit) + kv.take(num_fresh)
        self._open[blocks[-1]] = tuple(blocks), tuple(token_ids)
        return CacheAllocation(tuple(blocks), len(hit.blocks) * kv.block_size)

    def close(self, block_ids: Sequence[int], num_computed: int | None) -> tuple[int, ...]:
        """Forget an allocation and return the tokens of it that were computed; `ValueError` when there is none."""
        blocks, tokens = self._open.get(block_ids[-1], ((), ())) if block_ids else ((), ())
        if not blocks or tuple(block_ids) != blocks:
            raise ValueError("block_ids were not allocated, or were deallocated already")
        if num_computed is not None:
            check_int("num_computed", num_computed, 0, len(tokens))
        del self._open[blocks[-1]]
        return tokens[:num_computed]
