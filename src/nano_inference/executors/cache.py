"""`CacheMemory`: the cache component of the executors that compute in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from nano_inference.config import KvDtype
from nano_inference.executors.devices import free_bytes, release_unused
from nano_inference.executors.protocol import CacheSize
from nano_inference.models.program import Program


class Store(Protocol):
    """The memory of one cache."""

    @property
    def num_bytes(self) -> int: ...
    def free(self) -> None: ...
    def restore(self) -> None: ...


AnyStore = TypeVar("AnyStore", bound=Store)


class CacheMemory(Generic[AnyStore]):
    """Owns an executor's store, once it is allocated; satisfies `protocol.Cache`, which documents it."""

    def __init__(
        self,
        program: Program,
        device: torch.device,
        dtype_of: Callable[[KvDtype], torch.dtype],
        make: Callable[[CacheSize, torch.dtype], AnyStore],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called before the memory is replaced or freed."""
        self._program, self._device = program, device
        self._dtype_of, self._make, self._on_change = dtype_of, make, on_change
        self._store: AnyStore | None = None

    @property
    def is_allocated(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> AnyStore:
        assert self._store is not None, "there is no cache"
        return self._store

    def dtype(self, wanted: KvDtype) -> torch.dtype:
        return self._dtype_of(wanted)

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        return self._program.kv_bytes_per_token(self.dtype(dtype).itemsize) * block_size

    def free_bytes(self, share: float) -> int:
        return free_bytes(self._device, share)

    def allocate(self, size: CacheSize) -> None:
        self._on_change()
        self._store = self.make(size)

    def make(self, size: CacheSize) -> AnyStore:
        return self._make(size, self.dtype(size.dtype))

    def drop(self) -> None:
        """Forget the store, so that there is no cache."""
        self._on_change()
        self._store = None

    def free(self) -> None:
        self._on_change()
        self.store.free()
        release_unused(self._device)

    def restore(self) -> None:
        self._on_change()
        self.store.restore()

    @property
    def num_bytes(self) -> int:
        return 0 if self._store is None else self._store.num_bytes
