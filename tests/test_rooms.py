"""What import-linter (pyproject.toml) does not check: no state in modules, no torch before its use, public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import nano_inference

HOME = Path(nano_inference.__file__).parent
FACE = ast.parse((HOME / "__init__.pyi").read_text())
HOMES = {
    alias.name: str(node.module).removeprefix("nano_inference.")
    for node in FACE.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> the module that declares it."""
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"),
    *("appendleft", "popleft", "extendleft", "sort", "reverse", "move_to_end"),
}


def globals_written(tree: ast.Module) -> set[str]:
    """Return the module-level names that hold a new container and are changed somewhere in the module."""
    bound = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    written: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            written.append(node.func.value)
        elif isinstance(node, ast.AugAssign):
            written.append(node.target)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written.append(node.value)
    found: set[str] = set()
    for root in written:
        while isinstance(root, ast.Subscript | ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in bound:
            found.add(root.id)
    return found


@pytest.mark.slow
def test_no_state_lives_in_a_module() -> None:
    for path in sorted(HOME.rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], f"{path}: global"
        assert not globals_written(tree), path


def test_written_globals_are_found() -> None:
    source = "a = []\nb = {}\nc = set()\nd = {1: []}\ne = [1]\nf = dict()\ng: list[int] = []\n"
    body = "def f():\n    a.append(1)\n    b[1] = 2\n    c.add(3)\n    d[1].append(2)\n    del f[1]\n"
    loop = "g += [1]\nx = []\ndef h(y):\n    z = y[1]\n    return e[0]\n"
    assert globals_written(ast.parse(source + body + loop)) == set("abcdfg")


def test_every_public_name_imports_and_lives_where_the_face_says() -> None:
    assert dir(nano_inference) == nano_inference.__all__ == sorted([*HOMES, "__version__"])
    for name, home in HOMES.items():
        assert getattr(nano_inference, name) is getattr(importlib.import_module(f"nano_inference.{home}"), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nano_inference.nothing


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout", "rl.rollout"),
        ("integrations.ray_serve", "server.ray_serve"),
        ("loader.checkpoint", "loading.checkpoint"),
    ],
)
def test_moved_module_is_the_same_module_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning) as seen:
        found = importlib.import_module(f"nano_inference.{old}")
    assert str(seen[-1].message) == f"nano_inference.{old} is deprecated: import nano_inference.{new}"
    assert found is importlib.import_module(f"nano_inference.{new}") and found.__name__ == f"nano_inference.{new}"


@pytest.mark.parametrize(
    "code",
    [
        "import nano_inference as n; n.EngineConfig('m'); n.schedule; n.Sequence; n.RadixKVCache(2, 2)",
        "import nano_inference.async_engine",
        *(f"from nano_inference.cli import main; main({words})" for words in (["--help"], ["serve", "--help"])),
    ],
)
def test_torch_is_not_imported_before_its_use(code: str) -> None:
    code += "; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
