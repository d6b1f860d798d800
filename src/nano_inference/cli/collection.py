"""The cyclic garbage collector while a server starts: off, because nearly all that a start makes stays.

It would look through the modules' objects, a few hundred thousand, again and again, which is a tenth of the start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold the collector off; afterwards it is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
