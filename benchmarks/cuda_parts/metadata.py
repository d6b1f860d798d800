"""The package's metadata for a checkout that is not installed: nanochat's formats are found by their entry points."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

PACKAGE = "nano-inference"


def is_installed() -> bool:
    """Return whether Python finds the package's metadata."""
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_metadata(root: Path, directory: Path) -> None:
    """Write the entry points of `root`/pyproject.toml to a folder that the caller adds to `sys.path`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    target = directory / f"{PACKAGE.replace('-', '_')}-0.dist-info"
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (target / "entry_points.txt").write_text("\n".join(lines) + "\n")
