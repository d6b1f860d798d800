"""KV cache memory in the layout of the CPU kernels.

Shapes: L layers, N blocks, K kv heads, D head size, Z slots per block.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from nano_inference.core.step import BlockCopy
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.native import Cache
from nano_inference.executors.states import StateSlots
from nano_inference.support.memory import lazy_zeros

PIECE_BYTES = 4 << 20

Populate = Callable[[int, int], None]  # faults in the bytes [start, stop). Failures are ignored: they only cost time.


class Populator:
    """Owns a thread that faults in pages up to `ahead` bytes after the highest byte in use; started on demand."""

    def __init__(self, num_bytes: int, ahead: int, populate: Populate, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._num_bytes = num_bytes
        self._ahead = ahead
        self._populate = populate
        self._piece_bytes = piece_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted = 0
        self._done = 0
        self._brought_in = 0
        self.is_closed = False
        self._thread: threading.Thread | None = None

    def reach(self, end: int) -> None:
        """Report that bytes up to `end` are in use; starts faulting in the pages after them."""
        wanted = min(end + self._ahead, self._num_bytes)
        if wanted <= self._wanted:
            return
        with self._changed:
            self._wanted = wanted
            if not self._is_running() and not self.is_closed:
                self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until all requested pages are present, at most `timeout` seconds; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._brought_in >= self._wanted, timeout)

    def close(self) -> None:
        """End the thread after its current piece: killing it at interpreter exit would abort the process."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._is_running() and self._thread is not threading.current_thread():
            self._thread.join()

    def recover(self) -> None:
        """Release the lock if an exception kept this thread from releasing it."""
        with suppress(RuntimeError):  # raised once this thread does not hold it
            while True:
                self._lock.release()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._done >= self._wanted and not self.is_closed:
                    self._changed.wait()
                if self.is_closed:
                    return
                start = self._done
                stop = self._done = min(self._wanted, start + self._piece_bytes)
            self._populate(start, stop)
            with self._changed:
                self._brought_in = stop
                self._changed.notify_all()


AHEAD_BYTES = 96 << 20  # bytes of keys, and of values, whose pages are faulted in before they are needed
_SLACK = 64  # values after the last block, because the kernels load whole vectors


class KernelStore:
    """Owns the K and V of every block of every layer, float32 or bfloat16, and the slots of recurrent states."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        library: Library,
        *,
        dtype: torch.dtype = torch.float32,
        eager: bool = False,
        states: StateSlots | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        make_populator: Callable[[int, int, Populate], Populator] = Populator,
    ) -> None:
        """Allocate; `eager` faults in all pages in the background, not only those of the next blocks."""
        self._ahead_bytes = ahead_bytes
        self._make_populator = make_populator
        self._library = library
        self._dtype = dtype
        self._is_eager = eager
        self._populator: Populator | None = None
        self._closing: weakref.finalize[..., KernelStore] | None = None
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._shape = (num_layers, num_kv_heads, head_dim, block_size)
        self._states = states
        self._make(self.num_blocks)

    def restore(self) -> None:
        """Allocate the memory, zeroed."""
        if self._states is not None:
            self._states.restore()
        self._make(self.num_blocks)

    def free(self) -> None:
        """Free the memory; the store is unusable until `restore`."""
        if self._states is not None:
            self._states.free()
        self._make(0)

    def recover(self) -> None:
        """Release locks that an interruption of the calling thread left held."""
        if self._populator is not None:
            self._populator.recover()

    @property
    def num_bytes(self) -> int:
        """Return the allocated bytes of keys, values and states."""
        num_states = 0 if self._states is None else self._states.num_bytes
        return self._k_NLKDZ.nbytes + self._v_NLKZD.nbytes + num_states

    def _make(self, num_blocks: int) -> None:
        num_layers, num_kv_heads, head_dim, size = self._shape
        block_values = num_layers * num_kv_heads * head_dim * size
        total = num_blocks * block_values
        k, v = (lazy_zeros((total + _SLACK,), self._dtype, torch.device("cpu")) for _ in range(2))
        self.cache = Cache(k, v, size, block_values, None if self._states is None else self._states.slots_ZF)
        self._block_bytes = block_values * self._dtype.itemsize
        self._bring_in(k, v, num_blocks * self._block_bytes)
        self._k_NLKDZ = k[:total].view(num_blocks, num_layers, num_kv_heads, head_dim, size)
        self._v_NLKZD = v[:total].view(num_blocks, num_layers, num_kv_heads, size, head_dim)

    def wait_for_pages(self, timeout: float) -> bool:
        """Wait until all requested pages are present, at most `timeout` seconds; return whether they are."""
        return self._populator is None or self._populator.wait(timeout)

    def _bring_in(self, k: Tensor, v: Tensor, num_bytes: int) -> None:
        """Replace the populator by one for this memory."""
        code = self._library.code

        def populate(start: int, stop: int) -> None:
            for cache in (k, v):
                code.nano_populate(cache.data_ptr() + start, stop - start)

        if self._closing is not None:
            self._closing()  # also drops the finalizer, which keeps the previous memory alive through its populator
        ahead = num_bytes if self._is_eager else self._ahead_bytes
        self._populator = self._make_populator(num_bytes, ahead, populate)
        self._closing = weakref.finalize(self, self._populator.close)
        if self._is_eager and num_bytes:
            self._populator.reach(0)

    def prepare(self, fresh: Sequence[int], copies: Sequence[BlockCopy]) -> None:
        """Copy the first slots of blocks into others, and fault in the pages of `fresh` blocks and the next ones.

        Fresh blocks are not cleared: the kernels never read a slot that was not written. A source that is also a target
        (it was evicted, and then taken for another copy) is saved first. The others are not: a clone for each of 256
        samples of one prompt, which copy the same block, took 280 MB.
        """
        if fresh and self._populator is not None:
            self._populator.reach(self._block_bytes * (max(fresh) + 1))
        targets = frozenset(copy.target for copy in copies)
        overwritten = frozenset(copy.source for copy in copies) & targets
        saved = {block: (self._k_NLKDZ[block].clone(), self._v_NLKZD[block].clone()) for block in overwritten}
        for source, target, num_tokens in copies:
            k_LKDZ, v_LKZD = saved.get(source) or (self._k_NLKDZ[source], self._v_NLKZD[source])
            self._k_NLKDZ[target, ..., :num_tokens] = k_LKDZ[..., :num_tokens]
            self._v_NLKZD[target, :, :, :num_tokens] = v_LKZD[:, :, :num_tokens]
