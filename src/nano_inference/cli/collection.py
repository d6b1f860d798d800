"""Disabling of the cyclic garbage collector while a server starts.

Almost no object created during startup is garbage, and collections would take a tenth of the startup time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the collector while the block runs; re-enable it if it was enabled."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
