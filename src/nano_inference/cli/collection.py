"""The cyclic garbage collector while a server starts: off, because nearly all that a start makes stays.

It would look through the modules' objects, a few hundred thousand, again and again, which is a tenth of the start.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[Callable[[], None]]:
    """Hold the collector off; give what turns it on again before the block ends. Afterwards it is as it was."""
    was_on = gc.isenabled()
    gc.disable()

    def restore() -> None:
        if was_on:
            gc.enable()

    try:
        yield restore
    finally:
        restore()
