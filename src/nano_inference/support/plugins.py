"""Tables of named rows: those of this package, then those of installed packages, added by entry points.

A package adds a row in its pyproject.toml, for example to the table of families:

    [project.entry-points."nano_inference.families"]
    granite = "my_package.granite:FAMILY"

The caller builds a table once and passes it on as an argument.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

_T = TypeVar("_T")


class PluginError(ValueError):
    """An installed package adds an unusable row. The message names the entry point, its package and the reason."""


def table(group: str, own: Mapping[str, _T], kind: type[_T]) -> Mapping[str, _T]:
    """Return `own`, followed by the rows of every entry point in `group`, sorted by name.

    Raises `PluginError` for a row that cannot be imported, is not an instance of `kind`, or has a name already used.
    """
    rows = dict(own)
    path = []
    for entry in sys.path:
        with suppress(OSError):
            path.append((entry, Path(entry or ".").stat().st_mtime_ns))
    for point in sorted(_installed_points(group, tuple(path)), key=lambda point: (point.name, point.value)):
        if point.name in rows:
            raise PluginError(f"{_where(point)}: the name {point.name} is taken")
        try:
            row = point.load()
        except Exception as error:  # another package's module may raise anything when it is imported
            why = " ".join(str(error).split())
            raise PluginError(f"{_where(point)}: {point.value}: {type(error).__name__}: {why}") from error
        if not isinstance(row, kind):
            raise PluginError(f"{_where(point)}: {point.value} is a {type(row).__name__}, not a {kind.__name__}")
        rows[point.name] = row
    return MappingProxyType(rows)


@lru_cache(maxsize=8)
def _installed_points(group: str, search_path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return a group's entry points; reading them opens a file for each package on `search_path`.

    Its entries are those of `sys.path` that exist, with their modification times in nanoseconds.
    """
    return tuple(entry_points(group=group))


def _where(point: EntryPoint) -> str:
    """Return an entry point and its package as text."""
    package = "" if point.dist is None else f" of the package {point.dist.name}"
    return f"entry point {point.group} {point.name}{package}"
