"""Classes under the names of other packages, so that they are pickled as those packages pickle theirs."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importable_as(module: str, kind: Any) -> Iterator[None]:
    """Make a class importable from another module while the block runs.

    Afterwards no module of that name is left: a package without a specification makes others fail that look for it.
    """
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    added = [name for name in names if name not in sys.modules]
    before = kind.__module__
    sys.modules.update({name: types.ModuleType(name) for name in added})
    setattr(sys.modules[module], kind.__name__, kind)
    kind.__module__ = module
    try:
        yield
    finally:
        kind.__module__ = before
        for name in added:
            del sys.modules[name]
