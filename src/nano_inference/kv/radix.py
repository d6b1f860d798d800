"""Prefix reuse by token: a tree of the tokens, one block a node.

A node's label is the tokens of its block: `block_size` of them, or fewer while a sequence's last block is filling. Only
full nodes have children. A prompt that diverges inside a block may copy the matching slots (`Hit.partial_block`), so
that a hit is exact to the token.

Blocks are released from the last to the first, and a sequence that holds a node holds its parent, so the least recently
released node is always a leaf: eviction never searches the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from nano_inference.kv.pool import Hit, KVManager, Salt

_PARTIAL_CANDIDATES = 8
"""Most nodes compared, newest first, for a partial match: bounds the work, not the correctness."""


class _Node:
    """A published block, or the root of one salt (block -1)."""

    __slots__ = ("block", "by_first", "children", "parent", "salt", "tokens")

    def __init__(self, parent: _Node | None, salt: Salt, tokens: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block
        self.children: dict[tuple[int, ...], _Node] = {}
        """Full children by label."""
        self.by_first: dict[int, dict[int, _Node]] = {}
        """All children: first token of the label -> block -> node, newest last."""


class RadixKVCache(KVManager):
    """The tree of published blocks; see `KVManager`."""

    def _forget_all(self) -> None:
        self._roots: dict[Salt, _Node] = {}
        self._node_of: dict[int, _Node] = {}

    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """Return the whole blocks that these tokens can share, and the block of which they can copy a part."""
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
        block, count = _longest_match(node, tuple(tokens[start : min(limit, start + self.block_size)]))
        return Hit(tuple(found), num_idle, block, count)

    def publish(self, tokens: Sequence[int], salt: Salt, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Publish a partly filled last block too; replace published full blocks: a sequence holds all its parents."""
        size = self.block_size
        table = list(blocks)
        if not end:
            return table
        parent = self._node_of.get(blocks[start - 1]) if start else self._root(salt)
        for index in range(start, -(-end // size)):
            if parent is None or (parent.block >= 0 and len(parent.tokens) < size):
                break  # the prefix is private or flushed, so its continuations cannot be found
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

    def check(self) -> None:
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

    def _is_findable(self, block: int) -> bool:
        return block in self._node_of

    def _root(self, salt: Salt) -> _Node:
        """Return the root of a salt; create it if there is none."""
        if salt not in self._roots:
            self._roots[salt] = _Node(None, salt, (), -1)
        return self._roots[salt]

    def _walk(self, root: _Node) -> Iterator[_Node]:
        """Yield every node below a root; assert that its links are consistent."""
        assert root.by_first, "a root has at least one child"
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
        """Add a block below its parent, or extend its label; return None if a partial block is already there."""
        node = self._node_of.get(block)
        full = len(label) == self.block_size
        if node is None:
            if not full and _longest_match(parent, label)[1] == len(label):
                return None
            node = self._node_of[block] = _Node(parent, parent.salt, label, block)
            parent.by_first.setdefault(label[0], {})[block] = node
        elif len(label) > len(node.tokens):
            node.tokens = label
        if full:
            parent.children[label] = node
        return node

    def _forget(self, block: int) -> None:
        """Remove a leaf from the tree, and its root if the root has no other child."""
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


def _longest_match(parent: _Node, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Return the child block with the longest common prefix with `tokens`, and its length; (-1, 0) if none."""
    best_block, best_count = -1, 0
    group = parent.by_first.get(tokens[0], {})
    for block in islice(reversed(group), _PARTIAL_CANDIDATES):
        count = 0
        for token, other in zip(tokens, group[block].tokens, strict=False):
            if token != other:
                break
            count += 1
        if count > best_count:
            best_block, best_count = block, count
    return best_block, best_count
