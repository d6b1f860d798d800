"""Entry-point groups with the fields of their rows, and environment variables: what packages and shells rely on."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import nano_inference
from nano_inference.cli.app import build_app
from nano_inference.cli.arguments import ENV_PREFIX, walk_commands

HOME = Path(nano_inference.__file__).parent
_TABLE = re.compile(r"\btable\((\w+_GROUP), [^()]*, (\w+)\)")


def groups() -> Iterator[str]:
    """Return a line for each entry-point group with its rows' type, and one for each field of that type."""
    found: dict[str, type] = {}
    for path in sorted(HOME.rglob("*.py")):
        for group, kind in _TABLE.findall(path.read_text(encoding="utf-8")):
            module = importlib.import_module(_module_name(path))
            found[getattr(module, group)] = getattr(module, kind)
    for name, kind in sorted(found.items()):
        yield f"{name}: {kind.__module__}.{kind.__name__}"
        yield from (f"    {field.name}: {field.type}" for field in dataclasses.fields(kind))


def environment() -> Iterator[str]:
    """Return the name of each environment variable: one for each option, and those that the package reads itself."""
    options = {
        ENV_PREFIX + argument.name.removeprefix("--").replace("-", "_").upper()
        for _, command in walk_commands(build_app())
        for argument in command.assemble_argument_collection()
        if argument.parse and argument.name.startswith("--")
    }
    read = {name for path in HOME.rglob("*.py") for name in variables_in(ast.parse(path.read_text(encoding="utf-8")))}
    yield from sorted(options | read)


def variables_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file reads: `environ["A"]`, `environ.get("A")`, and with the prefix of our own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            owner, key = node.func.value, node.args[0]
        else:
            continue
        if ast.unparse(owner).split(".")[-1] == "environ":
            name = ast.unparse(key).replace("{ENV_PREFIX}", ENV_PREFIX).removeprefix("f").strip("'")
            yield from (name,) if name.isupper() else ()


def _module_name(path: Path) -> str:
    parts = path.relative_to(HOME.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")
