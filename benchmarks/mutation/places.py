"""Places of a source that can be changed into a mutant: operators, integers, conditions, calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult},
}


@dataclass(frozen=True)
class Mutant:
    """One change: the number of its place in the file's `places`."""

    file: str
    place: int
    line: int
    change: str
    function: int
    """First line of the innermost function around it; 0 outside of functions."""


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    """Yield every place that can be changed: its node, the change in words, and a function that changes it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for at, operator in enumerate(node.ops):
                yield from _swap(node, operator, lambda new, node=node, at=at: node.ops.__setitem__(at, new))
        elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign):
            yield from _swap(node, node.op, lambda new, node=node: setattr(node, "op", new))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, f"{node.value} -> {node.value + 1}", lambda node=node: setattr(node, "value", node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, f"{node.value} -> {not node.value}", lambda node=node: setattr(node, "value", not node.value)
        elif isinstance(node, ast.If):
            yield node, "condition negated", lambda node=node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "call removed", lambda node=node: setattr(node, "value", ast.Constant(None))


def _swap(
    node: ast.AST, operator: ast.AST, put: Callable[[ast.AST], None]
) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    new = SWAPS.get(type(operator))
    if new is not None:
        yield node, f"{type(operator).__name__} -> {new.__name__}", lambda: put(new())


def skipped_nodes(tree: ast.Module) -> set[int]:
    """Return the ids of nodes that no test could notice: annotations, assertions and calls of a logger."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Assert):
            parts.append(node)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(node.returns)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "_log" in ast.unparse(node.value.func):
            parts.append(node)
        found |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return found


def all_mutants(package: Path, rooms: frozenset[str]) -> list[Mutant]:
    """Return every mutant of the rooms, which are top-level modules, folders, or modules in folders."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not {name.partition("/")[0].removesuffix(".py"), name.removesuffix(".py")} & rooms:
            continue
        tree = ast.parse(path.read_text())
        skipped = skipped_nodes(tree)
        functions = functions_around(tree)
        for number, (node, change, _) in enumerate(places(tree)):
            if id(node) not in skipped:
                line = getattr(node, "lineno", 0)
                found.append(Mutant(name, number, line, change, functions.get(id(node), 0)))
    return found


def functions_around(tree: ast.Module) -> dict[int, int]:
    """Map the id of each node inside a function to the first line of the innermost one, its decorators included."""
    found: dict[int, int] = {}
    for node in ast.walk(tree):  # outer functions come before inner ones, which replace them
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(one.lineno for one in decorators)])
            body = node.body if isinstance(node.body, list) else [node.body]
            found |= {id(inner): first for part in body for inner in ast.walk(part)}
    return found


def mutated(source: str, place: int) -> str:
    """Return a source with the change at that place."""
    tree = ast.parse(source)
    for number, (_, _, apply) in enumerate(places(tree)):
        if number == place:
            apply()
            break
    return ast.unparse(ast.fix_missing_locations(tree))
