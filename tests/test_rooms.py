"""What import-linter (pyproject.toml) does not check: no state in modules, no torch before its use, public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import warnings
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
    *("appendleft", "popleft", "extendleft", "sort", "reverse", "move_to_end", "__setitem__", "__delitem__"),
}
MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}


def globals_written(tree: ast.Module) -> list[str]:
    """Module-level containers that the module changes."""
    bound: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    written = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            written.append(node.func.value)
        elif isinstance(node, ast.AugAssign):
            written.append(node.target)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written.append(node.value)
    return sorted({root.id for node in written if isinstance(root := root_of(node), ast.Name) and root.id in bound})


def is_container(node: ast.expr) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in MAKERS
    return isinstance(node, displays)


def root_of(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node


def test_no_state_lives_in_a_module() -> None:
    for path in sorted(HOME.rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], f"{path}: global"
        assert not globals_written(tree), path


def test_written_globals_are_found() -> None:
    source = "a = []\nb = {}\nc = set()\nd = {1: []}\ne = [1]\nf = dict()\ng: list[int] = []\n"
    body = "def f():\n    a.append(1)\n    b[1] = 2\n    c.add(3)\n    d[1].append(2)\n    del f[1]\n"
    loop = "g += [1]\nx = []\ndef h(y):\n    x = y[1]\n    return e[0]\n"
    assert globals_written(ast.parse(source + body + loop)) == ["a", "b", "c", "d", "f", "g"]


def test_every_public_name_imports_and_lives_where_the_face_says() -> None:
    assert nano_inference.__all__ == sorted([*HOMES, "__version__"])
    for name in nano_inference.__all__:
        assert getattr(nano_inference, name) is not None
    for name, home in HOMES.items():
        assert getattr(nano_inference, name) is getattr(importlib.import_module(f"nano_inference.{home}"), name)
    assert dir(nano_inference) == nano_inference.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nano_inference.nothing


def test_type_checkers_see_the_same_names() -> None:
    imports = [node for node in FACE.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    declared = {
        node.target.id for node in FACE.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert declared == {"__all__", "__version__"}


def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import sys, nano_inference as n; n.SamplingParams(); n.EngineConfig(model_path='m'); n.schedule;"
    code += "n.RadixKVCache(2, 2); import nano_inference.async_engine;"
    code += "assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout", "rl.rollout"),
        ("pool.local", "rl.pool.local"),
        ("integrations.trl", "rl.trl"),
        ("integrations.ray_serve", "server.ray_serve"),
        ("loader.checkpoint", "loading.checkpoint"),
        ("server.hosted", "server.run"),
    ],
)
def test_moved_module_is_the_same_module_and_warns(old: str, new: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = importlib.import_module(f"nano_inference.{old}")
    assert str(seen[-1].message) == f"nano_inference.{old} is deprecated: import nano_inference.{new}"
    assert seen[-1].category is DeprecationWarning
    assert found is importlib.import_module(f"nano_inference.{new}")
    assert found.__name__ == f"nano_inference.{new}" and found.__spec__ is not None


@pytest.mark.parametrize("words", [["--help"], ["chat", "--help"], ["serve", "--help"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = "import sys; from nano_inference.cli import main; code = main(sys.argv[1:]);"
    code += "assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60, stdout=subprocess.DEVNULL)
