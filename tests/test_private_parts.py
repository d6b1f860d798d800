"""No file of the package uses a private name of a dependency, as far as its syntax tree shows."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import nano_inference

HOME = Path(nano_inference.__file__).parent
KNOWN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "weights/member.py": frozenset({"_timeout"}),
        "parallel/links.py": frozenset({"_timeout", "_Options", "_devices"}),
        "server/verl/plugin.py": frozenset({"_ROLLOUT_REGISTRY"}),
    }
)
"""torch has no other names for the options of a process group: NCCL's timeout, without which its watchdog ends an
operation after 10 minutes, and Gloo's network interface, without which it listens on more than the loopback one. verl
has no other way to name a class for `rollout.name`."""
PUBLIC = frozenset({"_replace", "_asdict", "_fields", "_make"})
"""Names of named tuples, which are documented."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_" and name not in PUBLIC


def is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top != "nano_inference"


def foreign_names(tree: ast.AST) -> dict[str, str]:
    """Return the names that a file imports from a dependency, and what each is: `module` or `module:name`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_foreign(alias.name):
                    found[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and is_foreign(str(node.module)):
            found |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    return found


def private_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (part for name in names if is_foreign(name) for part in name.split(".") if is_private(part))


def root_of(node: ast.AST) -> str:
    """Return the name that an expression of attributes, calls and subscripts begins with; empty when it has none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes of what a file imports, calls, or declares with an imported type."""
    imported = set(foreign_names(tree))
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))]:
        nodes = list(within(scope))
        foreign = imported | {name for node in nodes for hint, name in declared_by(node) if root_of(hint) in imported}
        for node in nodes:
            if isinstance(node, ast.Attribute) and is_private(node.attr) and root_of(node.value) in foreign:
                yield node.attr


def within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope without those of the functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from within(node)


def declared_by(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the annotation or the value, and the name, of what a node declares, assigns or opens."""
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield node.annotation, node.arg
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.annotation, node.target.id
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        yield from ((node.value, target.id) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
        yield node.context_expr, node.optional_vars.id


def private_inherited(tree: ast.AST) -> Iterator[str]:
    """Yield private names that a class uses or overrides of a dependency's class it derives from."""
    foreign = foreign_names(tree)
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases = [loaded(foreign[name]) for name in map(root_of, cls.bases) if name in foreign]
        if not bases:
            continue
        own = {node.name for node in ast.walk(cls) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        uses = [node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and is_own(node.value)]
        own |= {node.attr for node in uses if isinstance(node.ctx, ast.Store)}
        own |= {target.id for node in cls.body for target in targets_of(node)}
        yield from (name for name in own if is_private(name) and any(hasattr(base, name) for base in bases))
        yield from (node.attr for node in uses if is_private(node.attr) and node.attr not in own)


def is_own(node: ast.AST) -> bool:
    """Return True for `self`, `cls` and `super()`."""
    return root_of(node) in ("self", "cls", "super") and not isinstance(node, ast.Attribute | ast.Subscript)


def targets_of(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target for target in targets if isinstance(target, ast.Name)]


def loaded(name: str) -> object:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if attribute else importlib.import_module(module)


def private_names(tree: ast.AST) -> set[str]:
    return {*private_imports(tree), *private_attributes(tree), *private_inherited(tree)}


def test_no_private_name_of_a_dependency_is_used() -> None:
    found = {
        path.relative_to(HOME).as_posix(): names
        for path in sorted(HOME.rglob("*.py"))
        if (names := private_names(ast.parse(path.read_text())))
    }
    assert found == KNOWN


def test_the_check_sees_what_it_looks_for() -> None:
    for source in (
        "import rich._cell_widths",
        "from rich import _x",
        "from rich.console import Console as C\nC()._x",
        "import rich\nrich.a.b[0]._x",
        "from rich.console import Console\ndef f(c: Console) -> None:\n    c._x = 1",
        "from rich.console import Console\nc = Console()\nc._x()",
        "import httpx2\nwith httpx2.Client() as c:\n    c._x",
        "from rich.console import Console\nclass C(Console):\n    def f(self):\n        return self._x",
        "from rich.console import Console\nclass C(Console):\n    def _detect_color_system(self): ...",
    ):
        assert private_names(ast.parse(source)), source
    for source in (
        "import os\nos._exit(1)",
        "from nano_inference import types\ntypes._x",
        "from rich.console import Console\nclass C(Console):\n    def f(self):\n        self._a = 1\n        self._a",
        "class C:\n    def f(self):\n        return self._x",
        "import rich\nrich.__doc__",
    ):
        assert not private_names(ast.parse(source)), source
