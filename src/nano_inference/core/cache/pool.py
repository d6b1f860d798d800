"""`KVManager`, the interface of both caches, and `BlockPool`, their reference counts.

A free block is blank, or idle: its K/V can still be found, and it is evicted when no blank block is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nano_inference.core.cache.states import StatePool
from nano_inference.support.checks import check_int
from nano_inference.types import CacheFull

Salt = tuple[int, str, int]
"""Weight version, cache namespace and number of the adapter: prefixes are shared only between equal salts."""


class Hit(NamedTuple):
    """Cached K/V that a prompt can reuse."""

    blocks: tuple[int, ...] = ()  # whole blocks, to be shared
    num_idle: int = 0  # how many of them are idle, and would leave the free list
    partial_block: int = -1
    """A block whose first `partial_tokens` slots continue the prefix, to be copied and never shared; -1 is none."""
    partial_tokens: int = 0
    state: int = -1
    """The snapshot of the state after the hit; -1 if the hit is empty, or without states."""
    reach: int = 0
    """With states: the tokens whose K/V is cached. At least those of the hit, which ends at a snapshot."""


class BlockPool:
    """Owns the reference counts of a fixed number of blocks. Evicts the least recently released idle block first."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    def idle(self) -> tuple[int, ...]:
        """Return the idle blocks, the next one to be evicted first."""
        return tuple(self._idle)

    def blank(self) -> tuple[int, ...]:
        return tuple(self._blank)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            if not self.refs[block]:
                del self._idle[block]
            self.refs[block] += 1

    def take(self, count: int, forget: Callable[[int], None]) -> list[int]:
        """Take blank blocks, then evict idle ones; `forget` is called with each evicted block."""
        if count > self.num_free():
            raise CacheFull(f"{count} KV blocks requested, {self.num_free()} of {len(self.refs)} are free")
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

    def release(self, blocks: Sequence[int], is_findable: Callable[[int], bool]) -> None:
        """Remove one reference from each block, last block first."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if is_findable(block):
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
        """Raise AssertionError unless every block is in exactly one state: held, idle or blank."""
        held = {block for block, count in enumerate(self.refs) if count}
        blank = set(self._blank)
        assert all(count >= 0 for count in self.refs)
        assert len(blank) == len(self._blank)
        assert not held & blank and not held & self._idle.keys() and not blank & self._idle.keys()
        assert len(held) + len(blank) + len(self._idle) == len(self.refs)


class KVManager(ABC):
    """Counts references to `num_blocks` blocks of `block_size` tokens and finds cached prefixes.

    With `num_states` slots of recurrent states, a prefix can be reused up to a snapshot of its state.
    """

    states: StatePool

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        check_int("num_blocks", num_blocks, 1)
        check_int("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_states = num_states
        self.reset()

    def reset(self) -> None:
        """Make every block blank; forget every prefix and reference. Can be interrupted and called again."""
        self._pool = BlockPool(self.num_blocks)
        self.states = StatePool(self.num_states)
        self._forget_all()

    def num_free_blocks(self) -> int:
        """Return how many blocks have no reference, with or without findable K/V."""
        return self._pool.num_free()

    def num_private(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks have exactly one reference."""
        return sum(self._pool.refs[block] == 1 for block in blocks)

    @abstractmethod
    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """Return the K/V that these tokens can reuse, except that of the last token. Changes nothing."""

    def hold(self, hit: Hit) -> list[int]:
        """Add a reference to a hit's whole blocks, and pin its state; return them as the start of a block table."""
        self._pool.hold(hit.blocks)
        if hit.state >= 0:
            self.states.pin(hit.state)
        return list(hit.blocks)

    def take(self, count: int) -> list[int]:
        """Return fresh blocks, evicting idle ones if needed. Raises `CacheFull` and then changes nothing."""
        return self._pool.take(count, self._evict)

    @abstractmethod
    def publish(self, tokens: Sequence[int], salt: Salt, blocks: list[int], start: int, end: int) -> list[int]:
        """Make the K/V of tokens[:end] findable, from block index `start` on; return the block table to continue with.

        That is `blocks`, or where another block with the same tokens is already published, a copy that may contain it
        instead; the replaced block is released.
        """

    def keep_state(
        self,
        slot: int,
        tokens: Sequence[int],
        salt: Salt,
        blocks: Sequence[int],
        position: int,
        *,
        is_spare: bool = False,
        is_end: bool = False,
    ) -> None:
        """Turn a held slot into a snapshot of the state after tokens[:position], or make it blank if none can find it.

        `blocks` is the table of the sequence that computed the state. The flags are those of `StatePool.keep`.
        """
        block = self._end_block(tokens, salt, blocks, position) if position else -1
        if block < 0:
            self.states.release(slot)
        else:
            self.states.keep(slot, block, (position - 1) % self.block_size + 1, is_spare=is_spare, is_end=is_end)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block, last block first: a prefix outlives its continuations."""
        self._pool.release(blocks, self._keep_or_forget)

    def flush(self) -> int:
        """Forget every prefix; return how many idle blocks became blank. Held blocks become blank when released."""
        self._forget_all()
        self.states.forget_all()
        return self._pool.blank_idle()

    def _evict(self, block: int) -> None:
        if self.num_states:
            self.states.forget(block)
        self._forget(block)

    def _end_block(self, tokens: Sequence[int], salt: Salt, blocks: Sequence[int], position: int) -> int:
        """Return the block in which tokens[:position] are found to end; -1 if there is none."""
        return -1

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if any invariant is violated."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Forget every prefix."""

    @abstractmethod
    def _forget(self, block: int) -> None:
        """Forget the prefix that ends with a block."""

    @abstractmethod
    def _keep_or_forget(self, block: int) -> bool:
        """Return whether a block that nothing holds is part of a prefix that can be found; called once on release."""
