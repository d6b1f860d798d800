"""The pages of the kernels' KV cache: brought in ahead of use, in order, no more than asked; and its block copies."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from nano_inference.core.step import BlockCopy
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.store import KernelStore, Populator

PIECE = 1000
WAIT_S = 30


class Notes:
    """Notes what is to be brought in; each piece waits for leave where that is asked for."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.threads: set[threading.Thread] = set()
        self.leave = threading.Semaphore(0 if is_held else 1 << 20)
        self.changed = threading.Condition()

    def __call__(self, start: int, stop: int) -> None:
        with self.changed:
            self.pieces.append((start, stop))
            self.threads.add(threading.current_thread())
            self.changed.notify_all()
        assert self.leave.acquire(timeout=WAIT_S)

    def wait(self, end: int) -> None:
        """Wait until bytes up to `end` were asked for."""
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.pieces) and self.pieces[-1][1] >= end, WAIT_S)

    def are_gone(self) -> bool:
        for thread in self.threads:
            thread.join(WAIT_S)
        return not any(thread.is_alive() for thread in self.threads)


def page_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-pages"}


def test_requested_ranges_are_mapped_in_order() -> None:
    notes = Notes()
    populator = Populator(10_500, 1500, notes, piece_bytes=PIECE)
    assert not notes.pieces and not notes.threads, "nothing was asked"
    populator.reach(100)
    notes.wait(1600)
    assert notes.pieces == [(0, 1000), (1000, 1600)]
    populator.reach(50)
    populator.reach(100)
    populator.reach(2100)
    notes.wait(3600)
    assert notes.pieces[2:] == [(1600, 2600), (2600, 3600)], "lower ends ask for nothing"
    populator.reach(9900)
    notes.wait(10_500)
    populator.reach(10_500)
    populator.close()
    assert notes.are_gone()
    assert notes.pieces[-1][1] == 10_500 and notes.pieces[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(notes.pieces))
    assert all(0 < stop - start <= PIECE for start, stop in notes.pieces)
    assert len(notes.threads) == 1


def test_running_thread_accepts_more_ranges_and_ends_after_its_piece() -> None:
    notes = Notes(is_held=True)
    populator = Populator(100_000, 0, notes, piece_bytes=PIECE)
    populator.reach(3000)
    notes.wait(1000)
    populator.reach(5000)
    notes.leave.release()
    notes.wait(2000)
    closing = threading.Thread(target=populator.close)
    closing.start()
    while not populator.is_closed:
        pass
    assert closing.is_alive(), "it waits for the piece at hand"
    notes.leave.release()
    closing.join(WAIT_S)
    assert not any(thread.is_alive() for thread in notes.threads)
    assert notes.pieces == [(0, 1000), (1000, 2000)], "closed in the middle of five pieces"


def test_closed_pager_starts_no_thread() -> None:
    notes = Notes()
    populator = Populator(100_000, 0, notes, piece_bytes=PIECE)
    populator.close()
    before = page_threads()
    populator.reach(5000)
    assert not page_threads() - before and not notes.pieces
    populator.close()


def make(library: Library, num_blocks: int = 8, *, eager: bool = False, block_size: int = 4) -> KernelStore:
    return KernelStore(2, num_blocks, block_size, 3, 5, library, eager=eager)


class Spy:
    """Replaces the library: records the ranges to map, and maps them."""

    def __init__(self, library: Library) -> None:
        self.notes = Notes()
        self._real = library.code

    @property
    def code(self) -> Spy:
        return self

    def nano_populate(self, start: int, size: int) -> int:
        self.notes(start, start + size)
        return int(self._real.nano_populate(start, size))


def spied(
    library: Library, *, eager: bool = False, ahead_bytes: int = 1 << 20, piece_bytes: int = PIECE
) -> tuple[KernelStore, Notes]:
    spy: Any = Spy(library)
    pager = partial(Populator, piece_bytes=piece_bytes)
    store = KernelStore(2, 40, 4, 3, 5, spy, eager=eager, ahead_bytes=ahead_bytes, make_populator=pager)
    return store, spy.notes


def wait_until(notes: Notes, is_there: Callable[[], bool]) -> None:
    with notes.changed:
        assert notes.changed.wait_for(is_there, WAIT_S)


def test_eager_store_is_mapped_whole_at_the_start(library: Library) -> None:
    store, notes = spied(library, eager=True)
    total = 40 * store.cache.block_values * 4
    for memory in (store.cache.k, store.cache.v):
        begin = memory.data_ptr()
        wait_until(notes, lambda begin=begin: (begin + total // PIECE * PIECE, begin + total) in notes.pieces)
        mine = [(a - begin, b - begin) for a, b in notes.pieces if begin <= a < begin + total]
        assert mine[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(mine))
        assert mine[-1][1] == total == store.num_bytes // 2, "not the slack behind it"
    del store
    gc.collect()
    assert notes.are_gone()


def test_lazy_store_is_mapped_as_blocks_are_taken(library: Library) -> None:
    store, notes = spied(library, ahead_bytes=700)
    store.prepare([], [])
    assert not notes.pieces
    block, v = 4 * store.cache.block_values, store.cache.v.data_ptr()
    store.prepare([2, 0], [])
    wait_until(notes, lambda: bool(notes.pieces) and notes.pieces[-1][1] == v + 3 * block + 700)
    store.prepare([1], [])
    store.prepare([30], [])
    wait_until(notes, lambda: notes.pieces[-1][1] == v + 31 * block + 700)
    store.free()
    assert notes.are_gone(), "freed memory is brought in no longer"


def test_thread_ends_with_the_store(library: Library) -> None:
    before = page_threads()
    store = make(library, eager=True)
    store.prepare([1], [])
    (thread,) = page_threads() - before
    alive = weakref.ref(store)
    del store
    gc.collect()
    assert alive() is None, "the thread holds no store"
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("eager", [True, False])
def test_contents_are_never_touched(library: Library, eager: bool) -> None:
    """The pages of a store that is in use, and whole pages of any other memory, brought in once more."""
    store, notes = spied(library, eager=eager, piece_bytes=16384)
    right = fill(store)
    store.prepare(list(range(40)), [])
    end = store.cache.v.data_ptr() + store.num_bytes // 2
    wait_until(notes, lambda: any(stop == end for _, stop in notes.pieces))
    assert store.wait_for_pages(WAIT_S)
    for memory in (store.cache.k, store.cache.v):
        assert library.code.nano_populate(memory.data_ptr(), memory.nbytes) <= 0
    assert torch.equal(store.cache.k, right[0]) and torch.equal(store.cache.v, right[1])


def fill(store: KernelStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random numbers everywhere; return copies."""
    generator = torch.Generator().manual_seed(1)
    for memory in (store.cache.k, store.cache.v):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    return store.cache.k.clone(), store.cache.v.clone()


@pytest.mark.parametrize("block_size", [4, 16])
def test_copies_read_every_source_before_anything_is_written(library: Library, block_size: int) -> None:
    store = make(library, block_size=block_size)
    fill(store)
    total = 8 * store.cache.block_values

    def views() -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys [N, L, K, Z, D] and values alike, from the documented layout."""
        k = store.cache.k[:total].view(8, 2, 3, 5, block_size).transpose(-1, -2).clone()
        return k, store.cache.v[:total].view(8, 2, 3, block_size, 5).clone()

    before, slack = views(), store.cache.k[total:].clone()
    copies = [
        BlockCopy(0, 1, 3),
        BlockCopy(1, 2, 2),
        BlockCopy(2, 0, 1),
        BlockCopy(1, 5, block_size),
        BlockCopy(7, 6, 1),
    ]
    store.prepare([1, 2, 0, 5, 6], copies)
    for old, new in zip(before, views(), strict=True):
        right = old.clone()
        for copy in copies:
            right[copy.target, :, :, : copy.num_tokens] = old[copy.source, :, :, : copy.num_tokens]
        assert torch.equal(new, right), "the slots behind stay as they are, and so do all other blocks"
        assert not torch.equal(new, old)
    assert torch.equal(store.cache.k[total:], slack)
