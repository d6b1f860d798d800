"""No file of the package imports a private name of a dependency, or reads one of what it imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import nano_inference

HOME = Path(nano_inference.__file__).parent
KNOWN = {
    "parallel/links.py": {"_Options"},  # Gloo's network interface: without it, it listens on more than the loopback one
    "server/verl/plugin.py": {"_ROLLOUT_REGISTRY"},  # verl has no other way to name a class for `rollout.name`
}


def private_names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            parts = f"{module}{alias.name}".split(".")
            if parts[0] not in sys.stdlib_module_names and parts[0] != "nano_inference":
                found.update(filter(is_private, parts))
                imported.add(alias.asname or (alias.name if module else parts[0]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.AST = node.value
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in imported:
                found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in ("_", "_replace", "_asdict", "_fields")


def test_no_private_name_of_a_dependency_is_used() -> None:
    found = {
        path.relative_to(HOME).as_posix(): private_names(ast.parse(path.read_text())) for path in HOME.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == KNOWN


@pytest.mark.parametrize(
    "source",
    [
        "import rich._cell_widths",
        "from rich import _x",
        "from rich import Console as C\nC()._x",
        "import rich\nrich.a[0]._x",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert private_names(ast.parse(source))
