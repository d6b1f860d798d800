"""Hides installed packages from this process. Imports nothing else, so that it can run before everything else."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Finder:
    """Finds modules and distributions as `PathFinder` does, but none of the hidden modules."""

    find_distributions = staticmethod(PathFinder.find_distributions)

    def __init__(self, hidden: Collection[str]) -> None:
        self._hidden = frozenset(hidden)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module lies; None, as for a module that is not installed, for a hidden one."""
        return None if name.partition(".")[0] in self._hidden else PathFinder.find_spec(name, path, target)


def hide(modules: Collection[str]) -> None:
    """Make imports of these top-level modules fail in this process, as if they were not installed, and of no others."""
    assert not set(modules) & sys.modules.keys(), "hidden too late"
    index = next(i for i, finder in enumerate(sys.meta_path) if finder is PathFinder or isinstance(finder, _Finder))
    sys.meta_path[index] = _Finder(modules)
