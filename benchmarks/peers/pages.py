"""Allocate a cache before the first request."""

from __future__ import annotations

from nano_inference import InferenceEngine
from nano_inference.executors.cpu.store import KernelStore

_LIMIT_S = 60


def wait_for_pages(engine: InferenceEngine) -> None:
    """Wait until the cache of an engine on the CPU has been brought in whole, which takes a core for seconds."""
    store = getattr(engine.parts.runner, "store", None)
    if isinstance(store, KernelStore):
        store.wait_for_pages(_LIMIT_S)
