"""Tensors from slabs: zeroed, aligned, disjoint, and freed with their last reference."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from nano_inference.support import memory
from nano_inference.support.memory import Slabs


@pytest.mark.parametrize("slab_bytes", [0, 300, 4096])
def test_pieces_are_zeroed_aligned_and_disjoint(slab_bytes: int) -> None:
    slabs = Slabs(slab_bytes)
    pieces = [slabs.take(num_bytes) for num_bytes in (1, 64, 100, 0, 5000, 7)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0 or not piece.numel()
        assert not piece.any()
        piece.fill_(number + 1)
    assert [piece.numel() for piece in pieces] == [1, 64, 100, 0, 5000, 7]
    assert all((piece == number + 1).all() for number, piece in enumerate(pieces))


def test_small_pieces_share_a_slab_and_large_ones_have_their_own() -> None:
    slabs = Slabs(1 << 16)
    first, second, large = slabs.take(1000), slabs.take(1000), slabs.take(1 << 17)
    assert second.data_ptr() - first.data_ptr() == 1024
    assert large.untyped_storage().nbytes() < (1 << 17) + 128


def test_slab_is_freed_with_its_last_piece() -> None:
    arrays: list[weakref.ref[np.ndarray]] = []

    def zeros(num_bytes: int) -> torch.Tensor:
        array = np.zeros(num_bytes, dtype=np.uint8)
        arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    slabs = Slabs(1 << 16, zeros)
    first, second = slabs.take(1000), slabs.take(1000)
    slabs.take(1 << 16)  # from here on the first slab is its pieces' alone
    del first
    gc.collect()
    assert arrays[0]() is not None and not second.any()
    del second
    gc.collect()
    assert arrays[0]() is None


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the system does not list memory")
def test_large_piece_is_returned_to_the_system() -> None:
    size = 16 << 20
    np.empty(size, np.uint8)  # once such a piece was freed, malloc serves others of its size from its heap
    parts = [np.empty(size, np.uint8) for _ in range(6)]
    pin = np.empty(1 << 18, np.uint8)  # behind them, so that the heap cannot shrink
    parts.clear()

    before = virtual_bytes()
    piece = memory.lazy_zeros((4 * size,), torch.uint8, torch.device("cpu"))
    assert virtual_bytes() - before >= 4 * size, "it came out of the heap"
    part = piece[5:6]
    del piece
    assert not part.any() and virtual_bytes() - before >= 4 * size
    del part
    assert virtual_bytes() - before < size
    assert pin.nbytes


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096
