"""Which weights computed which slot of the KV cache, and which states, written down beside a runner.

With `on_running="keep"` a token's log-probability depends on the versions that computed the K/V before it. Those are
decided by the steps (preemption, prefix hits), so they are recorded here and not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nano_inference.core.step import BlockCopy, Launch, Row, RowResult, Runner


@dataclass(eq=False, slots=True)
class Node:
    """One computed position: its token, its weights and the positions before it. Equal histories share a node."""

    parent: Node | None
    token: int
    version: int
    depth: int
    children: dict[tuple[int, int], Node] = field(default_factory=dict)

    def child(self, token: int, version: int) -> Node:
        """Return the position after this one, computed from `token` with the weights `version`."""
        key = token, version
        if key not in self.children:
            self.children[key] = Node(self, token, version, self.depth + 1)
        return self.children[key]

    def path(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens and the versions of all positions up to this one."""
        tokens: list[int] = []
        versions: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            versions.append(node.version)
            node = node.parent
        return tuple(reversed(tokens)), tuple(reversed(versions))


class Recorder:
    """A runner that passes every step on and records it. Raises `AssertionError` for a read of a wrong slot."""

    def __init__(self, inner: Runner, num_blocks: int, block_size: int, num_states: int) -> None:
        self._inner = inner
        self._states: list[Node | None] = [None] * num_states  # the last position that a state has seen
        self._block_size = block_size
        self._num_slots = num_blocks * block_size
        self._slots: list[Node | None] = [None] * self._num_slots
        self._root = Node(None, -1, -1, 0)
        self.version: Callable[[], int] = lambda: 0
        """The weights in force; the engine's own once there is one."""
        self.draws: dict[tuple[int, int], dict[int, Node]] = {}
        """(Request, sample index) -> position -> the node from whose logits a token was last drawn for it.

        A draw that the engine drops (a window before sleep or an update, a rejected draft) is repeated later, perhaps
        over K/V of other versions; what it commits is never drawn again.
        """
        self.num_drafts = 0
        self._last: dict[int, int] = {}  # the token that each row has sampled last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def free_cache(self) -> None:
        """Give the memory of the KV cache back."""
        self._slots = []
        self._inner.free_cache()

    def restore_cache(self) -> None:
        """Take it again, empty."""
        self._slots = [None] * self._num_slots
        self._inner.restore_cache()

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        """Run the step; record what each row read, wrote and drew."""
        self._move(copies, fresh)
        starts = [self._read(row) for row in rows]
        results, version = self._inner.run(rows, copies, fresh), self.version()
        for row, node in zip(rows, starts, strict=True):
            self._write(row, node, results[row.id], version)
        return results

    def wrapped(self, launch: Launch) -> Launch:
        """Return a function that starts steps, which are recorded in their order on the device, once they are read."""

        def start(
            rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...], *, is_next: bool
        ) -> Callable[[], Mapping[int, RowResult]] | None:
            version, collect = self.version(), launch(rows, copies, fresh, is_next=is_next)

            def read() -> Mapping[int, RowResult]:
                assert collect is not None
                results = collect()
                self._move(copies, fresh)
                for row in rows:
                    if results[row.id].tokens:  # without, its sequence ended in the window before
                        known = row._replace(tokens=(self._last[row.id],)) if is_next else row
                        self._write(known, self._read(known), results[row.id], version)
                return results

            return None if collect is None else read

        return start

    def _move(self, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> None:
        size = self._block_size
        copied = [(c, self._slots[c.source * size : c.source * size + c.num_tokens]) for c in copies]
        for block in fresh:
            self._slots[block * size : (block + 1) * size] = [None] * size
        for copy, nodes in copied:
            self._slots[copy.target * size : copy.target * size + copy.num_tokens] = nodes

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self._block_size] * self._block_size + position % self._block_size

    def _read(self, row: Row) -> Node:
        node = self._root
        for position in range(row.start):
            found = self._slots[self._slot(row, position)]
            assert found is not None, f"request {row.request_id} read position {position}, which no row wrote"
            assert found.parent is node, f"request {row.request_id} read another text's K/V at position {position}"
            node = found
        if row.state is not None and row.start:
            assert self._states[row.state.source] is node, f"request {row.request_id} read another text's state"
        return node

    def _write(self, row: Row, node: Node, result: RowResult, version: int) -> None:
        if result.tokens:
            self._last[row.id] = result.tokens[-1]
        first_draw = len(row.tokens) - row.num_drafts - 1
        drawn = self.draws.setdefault((row.request_id, row.sample_index), {})
        ahead = () if row.num_drafts else result.tokens[:-1]
        for place, token in enumerate((*row.tokens, *ahead)):
            node = node.child(token, version)
            self._slots[self._slot(row, row.start + place)] = node
            if row.num_sampled and place >= first_draw:
                drawn[node.depth] = node
            if row.state is not None:
                for count, slot in row.state.saves:
                    if count == node.depth:
                        self._states[slot] = node
        if row.state is not None:
            self._states[row.state.slot] = node
        self.num_drafts += row.num_drafts
