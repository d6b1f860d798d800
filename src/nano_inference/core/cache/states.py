"""`StatePool`: which slot holds which recurrent state. Integers only; executors own the memory."""

from __future__ import annotations

from collections import OrderedDict


class StatePool:
    """Owns the numbers of `num_slots` slots, each blank, held or a snapshot.

    A running sequence holds the slot of its state. A snapshot is the state after the first `count` tokens that end in
    a block that can be found; the least recently used one is evicted first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blank = list(range(num_slots - 1, -1, -1))
        self._held: set[int] = set()
        self._snapshots: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Slot -> (block, count), the next one to be evicted first."""
        self._of_block: dict[int, dict[int, int]] = {}
        """Block -> count -> slot, for blocks with snapshots."""
        self._ends: set[int] = set()
        self._pinned: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def take(self) -> int | None:
        """Return a slot to hold, evicting a snapshot if none is blank; None if the others are held or pinned."""
        if not self._blank:
            victim = next((slot for slot in self._snapshots if slot not in self._pinned), None)
            if victim is None:
                return None
            self._drop(victim)
        slot = self._blank.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Make a held slot blank."""
        self._held.remove(slot)
        self._blank.append(slot)

    def keep(self, slot: int, block: int, count: int, *, is_spare: bool = False, is_end: bool = False) -> None:
        """Turn a held slot into a snapshot; make it blank if one is equal.

        It is the first to be evicted if it `is_spare`, and from its first use on if it `is_end`: of an answer, from
        which one next turn starts.
        """
        known = self._of_block.setdefault(block, {})
        if count in known:
            self._snapshots.move_to_end(known[count])
            self.release(slot)
            return
        self._held.remove(slot)
        known[count] = slot
        self._snapshots[slot] = (block, count)
        if is_spare:
            self._snapshots.move_to_end(slot, last=False)
        if is_end:
            self._ends.add(slot)

    def snapshots(self) -> tuple[tuple[int, int], ...]:
        """Return (block, count) of every snapshot, the next one to be evicted first."""
        return tuple(self._snapshots.values())

    def has(self, block: int) -> bool:
        """Return whether a block has snapshots."""
        return block in self._of_block

    def longest(self, block: int, most: int) -> tuple[int, int]:
        """Return (count, slot) of a block's longest snapshot of at most `most` tokens; (0, -1) if there is none."""
        return max(((n, slot) for n, slot in self._of_block.get(block, {}).items() if n <= most), default=(0, -1))

    def pin(self, slot: int) -> None:
        """Keep a snapshot until `unpin`, and count it as used."""
        self._pinned.add(slot)
        self._snapshots.move_to_end(slot, last=slot not in self._ends)

    def unpin(self) -> None:
        self._pinned.clear()

    def forget(self, block: int) -> None:
        """Drop the snapshots of a block."""
        for slot in tuple(self._of_block.get(block, {}).values()):
            self._drop(slot)

    def forget_all(self) -> None:
        """Drop every snapshot."""
        for slot in tuple(self._snapshots):
            self._drop(slot)

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        blank = set(self._blank)
        assert len(blank) == len(self._blank)
        assert not blank & self._held and not blank & self._snapshots.keys() and not self._held & self._snapshots.keys()
        assert len(blank) + len(self._held) + len(self._snapshots) == self.num_slots
        found = {slot: (block, count) for block, known in self._of_block.items() for count, slot in known.items()}
        assert found == self._snapshots
        assert all(self._of_block.values()) and not self._pinned

    def _drop(self, slot: int) -> None:
        block, count = self._snapshots.pop(slot)
        self._ends.discard(slot)
        del self._of_block[block][count]
        if not self._of_block[block]:
            del self._of_block[block]
        self._blank.append(slot)
