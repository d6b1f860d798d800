"""Reuse by token: a tree of the tokens themselves, one block a node.

A node's label is the tokens of its block: `block_size` of them, or fewer where a sequence's last block is still
filling. Only full nodes have children. A prompt that leaves the tree inside a block may copy the part that agrees
(`Hit.partial_block`), so that a hit is exact to the token.

Tails are released before heads, and whoever holds a node holds its parent, so the least recently released node is
always a leaf: eviction never walks the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from nano_inference.checks import check_int
from nano_inference.kv.pool import NO_SALT, AllocationBook, BlockPool, Hit, Salt
from nano_inference.types import CacheAllocation

_PARTIAL_CANDIDATES = 8
"""Nodes compared, newest first, for the part of a block that agrees: a bound on the work, not on correctness."""


class _Node:
    """One published block, or (with block -1) the root of one salt."""

    __slots__ = ("block", "by_first", "children", "parent", "salt", "tokens")

    def __init__(self, parent: _Node | None, salt: Salt, tokens: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block
        self.children: dict[tuple[int, ...], _Node] = {}
        """Full children by their whole label."""
        self.by_first: dict[int, dict[int, _Node]] = {}
        """All children by the first token of their label, then by block; newest last."""


class RadixKVCache:
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
        self._roots: dict[Salt, _Node] = {}
        self._node_of: dict[int, _Node] = {}

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, findable or not."""
        return self._pool.num_free()

    def num_private(self, blocks: Sequence[int]) -> int:
        """How many of these nobody else holds."""
        return sum(self._pool.refs[block] == 1 for block in blocks)

    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """What the cache could give of these tokens: whole blocks to share, and a part of one to copy."""
        node = self._roots.get(salt)
        found: list[int] = []
        limit = len(tokens) - 1
        while node is not None and (len(found) + 1) * self.block_size <= limit:
            start = len(found) * self.block_size
            child = node.children.get(tuple(tokens[start : start + self.block_size]))
            if child is None:
                break
            found.append(child.block)
            node = child
        num_idle = sum(not self._pool.refs[block] for block in found)
        start = len(found) * self.block_size
        if node is None or start >= limit:
            return Hit(tuple(found), num_idle)
        block, count = _longest_agreement(node, tuple(tokens[start : min(limit, start + self.block_size)]))
        return Hit(tuple(found), num_idle, block, count)

    def hold(self, hit: Hit) -> list[int]:
        """Take a reference on a hit's whole blocks."""
        self._pool.hold(hit.blocks)
        return list(hit.blocks)

    def take(self, count: int) -> list[int]:
        """Take fresh blocks; `CacheFull` leaves no trace."""
        return self._pool.take(count, self._forget)

    def publish(self, tokens: Sequence[int], salt: Salt, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Make tokens[:end] findable, from block index `start` on, the filling part of the last block included.

        A full block that another already published is exchanged for that one, so that what follows hangs below a block
        which its holder holds.
        """
        size = self.block_size
        table = list(blocks)
        if not end:
            return table
        parent = self._node_of.get(blocks[start - 1]) if start else self._root(salt)
        for index in range(start, -(-end // size)):
            if parent is None or (parent.block >= 0 and len(parent.tokens) < size):
                break  # the prefix is private or flushed: what follows cannot be found through it
            label = tuple(tokens[index * size : min(end, (index + 1) * size)])
            owner = parent.children.get(label)
            if owner is None:
                parent = self._place(parent, label, table[index])
                continue
            if owner.block != table[index]:
                self._pool.hold([owner.block])
                self.release([table[index]])
                table[index] = owner.block
            parent = owner
        if not start and not self._roots[salt].by_first:
            del self._roots[salt]
        return table

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back, tails first."""
        self._pool.release(blocks, self._node_of.__contains__)

    def flush(self) -> int:
        """Forget every prefix; return how many idle blocks became blank."""
        self._roots.clear()
        self._node_of.clear()
        return self._pool.blank_idle()

    def allocate(self, token_ids: Sequence[int]) -> CacheAllocation:
        """Give a prompt its blocks, cached ones first; `CacheFull` leaves no trace. Never copies part of a block."""
        return self._book.open(self, self.peek(token_ids, NO_SALT), token_ids)

    def deallocate(self, block_ids: Sequence[int], num_computed: int | None = None) -> None:
        """Give a prompt's blocks back, publishing its first `num_computed` tokens (default: all)."""
        tokens = self._book.close(block_ids, num_computed)
        self.release(self.publish(tokens, NO_SALT, block_ids, 0, len(tokens)))

    def check(self) -> None:
        """Raise AssertionError on any lie in the books."""
        self._pool.check()
        seen = [node for root in self._roots.values() for node in self._walk(root)]
        assert len(seen) == len(self._node_of)
        assert all(self._node_of[node.block] is node for node in seen)
        order = {block: rank for rank, block in enumerate(self._pool.idle())}
        assert order.keys() == {node.block for node in seen if not self._pool.refs[node.block]}
        for node in seen:
            parent = node.parent
            if parent is not None and parent.block >= 0 and not self._pool.refs[parent.block]:
                assert not self._pool.refs[node.block] and order[node.block] < order[parent.block]

    def _root(self, salt: Salt) -> _Node:
        """Return a salt's root, made when there is none."""
        if salt not in self._roots:
            self._roots[salt] = _Node(None, salt, (), -1)
        return self._roots[salt]

    def _walk(self, root: _Node) -> Iterator[_Node]:
        """Yield every node below a root, checking each one's links."""
        assert root.by_first, "a root without children is dropped"
        stack = [root]
        while stack:
            node = stack.pop()
            family = [child for group in node.by_first.values() for child in group.values()]
            assert all(node.by_first.values())
            assert all(node.children[label].tokens == label for label in node.children)
            assert all(child in family for child in node.children.values())
            for child in family:
                assert child.parent is node and 0 < len(child.tokens) <= self.block_size
                assert node.by_first[child.tokens[0]][child.block] is child
            assert len(node.tokens) == self.block_size or not family or node is root
            stack += family
            if node is not root:
                yield node

    def _place(self, parent: _Node, label: tuple[int, ...], block: int) -> _Node | None:
        """Publish a block below its parent, or grow it there; None when a filling one's tokens are there already."""
        node = self._node_of.get(block)
        full = len(label) == self.block_size
        if node is None:
            if not full and _longest_agreement(parent, label)[1] == len(label):
                return None
            node = self._node_of[block] = _Node(parent, parent.salt, label, block)
            parent.by_first.setdefault(label[0], {})[block] = node
        elif len(label) > len(node.tokens):
            node.tokens = label
        if full:
            parent.children[label] = node
        return node

    def _forget(self, block: int) -> None:
        """Take a leaf out of the tree, and its root when that was the last."""
        node = self._node_of.pop(block)
        parent = node.parent
        assert parent is not None and not node.by_first, "only leaves are evicted"
        group = parent.by_first[node.tokens[0]]
        del group[block]
        if not group:
            del parent.by_first[node.tokens[0]]
        if parent.children.get(node.tokens) is node:
            del parent.children[node.tokens]
        if parent.block < 0 and not parent.by_first:
            del self._roots[parent.salt]


def _longest_agreement(parent: _Node, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Return the child's block that begins with most of `tokens`, and how many; (-1, 0) when none does."""
    best_block, best_count = -1, 0
    group = parent.by_first.get(tokens[0], {})
    for block in islice(reversed(group), _PARTIAL_CANDIDATES):
        count = 0
        for ours, theirs in zip(tokens, group[block].tokens, strict=False):
            if ours != theirs:
                break
            count += 1
        if count > best_count:
            best_block, best_count = block, count
    return best_block, best_count
