"""Prefix reuse by token: a tree of the tokens, one block a node.

A node's label is the tokens of its block: `block_size` of them, or fewer while a sequence's last block is filling. Only
full nodes have children. A prompt that diverges inside a block may copy the matching slots (`Hit.partial_block`), so
that a hit is exact to the token.

A node is the number of its block, and the root of a salt is a negative number: the tree is a few dicts of numbers and
labels. With an object for each node, a long generation would leave Python's garbage collector new objects to search in
every step.

Blocks are released from the last to the first, and a sequence that holds a node holds its parent, so the least recently
released node is always a leaf: eviction never searches the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from nano_inference.core.cache.pool import Hit, KVManager, Salt

_PARTIAL_CANDIDATES = 8  # most nodes compared, newest first, for a partial match: bounds the work, not the correctness
Label = tuple[int, ...]


class RadixKVCache(KVManager):
    """The tree of published blocks; see `KVManager`."""

    def _forget_all(self) -> None:
        self._roots: dict[Salt, int] = {}
        self._salt_of: dict[int, Salt] = {}  # root -> its salt
        self._last_root = 0
        self._label_of: dict[int, Label] = {}
        self._parent_of: dict[int, int] = {}
        self._full: dict[tuple[int, Label], int] = {}  # (parent, label) -> full child
        self._by_first: dict[tuple[int, int], dict[int, None]] = {}
        """(parent, first token of the label) -> children, newest last."""
        self._num_children: dict[int, int] = {}  # parent -> number of its children, if it has any

    def peek(self, tokens: Sequence[int], salt: Salt) -> Hit:
        """Return the whole blocks that these tokens can share, and the block of which they can copy a part."""
        node = self._roots.get(salt)
        found: list[int] = []
        limit = len(tokens) - 1
        while node is not None and (len(found) + 1) * self.block_size <= limit:
            start = len(found) * self.block_size
            child = self._full.get((node, tuple(tokens[start : start + self.block_size])))
            if child is None:
                break
            found.append(child)
            node = child
        if self.num_states:
            return self._peek_state(tokens, salt, found, limit)
        num_idle = sum(not self._pool.refs[block] for block in found)
        start = len(found) * self.block_size
        if node is None or start >= limit:
            return Hit(tuple(found), num_idle)
        block, count = self._longest_match(node, tuple(tokens[start : min(limit, start + self.block_size)]))
        return Hit(tuple(found), num_idle, block, count)

    def publish(self, tokens: Sequence[int], salt: Salt, blocks: list[int], start: int, end: int) -> list[int]:
        """Publish a partly filled last block too; replace published full blocks: a sequence holds all its parents."""
        size = self.block_size
        table = blocks
        if not end:
            return table
        before = blocks[start - 1] if start else self._root(salt)
        if not self._can_have_children(before):
            return table  # the prefix is private or flushed, so its continuations cannot be found
        parent: int | None = before
        for index in range(start, -(-end // size)):
            if parent is None:
                break
            block, label = table[index], tuple(tokens[index * size : min(end, (index + 1) * size)])
            owner = self._full.setdefault((parent, label), block) if len(label) == size else block
            if owner == block:
                parent = self._place(parent, label, block)
                continue
            self._pool.hold([owner])
            self.release([block])
            if table is blocks:
                table = blocks.copy()
            table[index] = parent = owner
        if not start:
            self._drop_unused_root(self._roots[salt])
        return table

    def _peek_state(self, tokens: Sequence[int], salt: Salt, found: list[int], limit: int) -> Hit:
        """Return the longest hit that ends at a snapshot. `found` are the full blocks of the prefix, in order."""
        size = self.block_size
        reach = len(found) * size
        path = [self._roots[salt], *found] if salt in self._roots else []
        for index in range(len(path) - 1, -1, -1):
            label = tuple(tokens[index * size : min(limit, (index + 1) * size)])
            if index == len(found) and label:
                reach += self._longest_match(path[-1], label)[1]
            best = (0, -1, -1)
            for block in chain(found[index : index + 1], self._children(path[index], label)):
                if self.states.has(block):
                    best = max(best, (*self.states.longest(block, _num_equal(label, self._label_of[block])), block))
            count, slot, block = best
            if count:
                whole = tuple(found[: index + (count == size)])
                num_idle = sum(not self._pool.refs[one] for one in whole)
                return Hit(whole, num_idle, *((-1, 0) if count == size else (block, count)), state=slot, reach=reach)
        return Hit(reach=reach)

    def _end_block(self, tokens: Sequence[int], salt: Salt, blocks: Sequence[int], position: int) -> int:
        index = (position - 1) // self.block_size
        label = tuple(tokens[index * self.block_size : position])
        if len(self._label_of.get(blocks[index], ())) >= len(label):
            return blocks[index]
        parent = blocks[index - 1] if index else self._roots.get(salt)
        block, count = (-1, 0) if parent is None else self._longest_match(parent, label)
        return block if count == len(label) else -1

    def check(self) -> None:
        self._pool.check()
        self.states.check()
        for block, count in self.states.snapshots():
            assert len(self._label_of[block]) >= count
        for root in self._roots.values():
            assert root in self._num_children, "a root has at least one child"
        seen = list(self._walk(self._roots.values()))
        assert len(seen) == len(self._label_of) == len(self._parent_of) == len(set(seen))
        assert {salt: root for root, salt in self._salt_of.items()} == self._roots
        assert all(self._by_first.values())
        assert sum(self._num_children.values()) == sum(map(len, self._by_first.values())) == len(seen)
        assert len(self._full) == sum(len(label) == self.block_size for label in self._label_of.values())
        for (parent, label), node in self._full.items():
            assert self._parent_of[node] == parent and self._label_of[node] == label
            assert len(label) == self.block_size
        order = {block: rank for rank, block in enumerate(self._pool.idle())}
        assert order.keys() == {node for node in seen if not self._pool.refs[node]}
        for node in seen:
            parent = self._parent_of[node]
            if parent >= 0 and not self._pool.refs[parent]:
                assert not self._pool.refs[node] and order[node] < order[parent]

    def _walk(self, roots: Iterable[int]) -> Iterator[int]:
        """Yield every node below these; assert that its links are consistent."""
        family: dict[int, list[int]] = {}
        for (parent, first), group in self._by_first.items():
            family.setdefault(parent, []).extend(group)
            assert all(self._label_of[child][0] == first for child in group)
        stack = list(roots)
        while stack:
            node = stack.pop()
            children = family.get(node, [])
            assert len(children) == self._num_children.get(node, 0)
            assert not children or self._can_have_children(node)
            for child in children:
                assert self._parent_of[child] == node and 0 < len(self._label_of[child]) <= self.block_size
            stack += children
            if node >= 0:
                yield node

    def _keep_or_forget(self, block: int) -> bool:
        return block in self._label_of

    def _can_have_children(self, node: int) -> bool:
        """Return whether a node is a root, or a published full block."""
        return node < 0 or len(self._label_of.get(node, ())) == self.block_size

    def _root(self, salt: Salt) -> int:
        """Return the root of a salt; create it if there is none."""
        root = self._roots.get(salt)
        if root is None:
            self._last_root -= 1
            root = self._roots[salt] = self._last_root
            self._salt_of[root] = salt
        return root

    def _drop_unused_root(self, node: int) -> None:
        """Forget a root without children."""
        if node < 0 and node not in self._num_children:
            del self._roots[self._salt_of.pop(node)]

    def _place(self, parent: int, label: Label, block: int) -> int | None:
        """Add a block below its parent, or extend its label; return None if a partial block is already there.

        A full block is in `_full` already.
        """
        known = self._label_of.get(block)
        is_full = len(label) == self.block_size
        if known is None:
            group = self._by_first.setdefault((parent, label[0]), {})
            if group and not is_full and self._longest_match(parent, label)[1] == len(label):
                return None
            group[block] = None
            self._parent_of[block] = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        if known is None or len(label) > len(known):
            self._label_of[block] = label
        return block

    def _forget(self, block: int) -> None:
        """Remove a leaf from the tree, and its root if the root has no other child."""
        assert block not in self._num_children, "only leaves are evicted"
        label, parent = self._label_of.pop(block), self._parent_of.pop(block)
        group = self._by_first[parent, label[0]]
        del group[block]
        if not group:
            del self._by_first[parent, label[0]]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
        if self._full.get((parent, label)) == block:
            del self._full[parent, label]
        self._drop_unused_root(parent)

    def _longest_match(self, parent: int, tokens: Label) -> tuple[int, int]:
        """Return the child with the longest common prefix with `tokens`, and its length; (-1, 0) if none."""
        best_block, best_count = -1, 0
        for block in self._children(parent, tokens):
            count = _num_equal(tokens, self._label_of[block])
            if count > best_count:
                best_block, best_count = block, count
        return best_block, best_count

    def _children(self, parent: int, tokens: Label) -> Iterator[int]:
        """Return the newest children whose labels start with the first of these tokens."""
        group = self._by_first.get((parent, tokens[0]), {}) if tokens else {}
        return islice(reversed(group), _PARTIAL_CANDIDATES)


def _num_equal(tokens: Label, others: Label) -> int:
    """Return the length of the longest common prefix."""
    count = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        count += 1
    return count
