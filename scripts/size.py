"""Print the size of the package, of its core and engine, and of its functions. Fails if a file has over 450 lines."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "nano_inference"
LONG_FILE, MOST_LINES, LONG_FUNCTION = 350, 450, 40
CORE_ROOMS = "types support/samples support/checks config core engine async_engine"
LONGEST = {"engine.py": 1005, "async_engine.py": 760}
"""The public classes: their methods' docstrings are the reference, and one file says what an engine does."""
MOST_CORE_LINES = 5_500
"""The aim; printed only."""


def main() -> int:
    """Measure every file of the package; return 1 if one is too long."""
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in files}
    lengths: list[int] = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append(length(node))
                if lengths[-1] > LONG_FUNCTION:
                    print(f"  long function: {path.relative_to(PACKAGE)}:{node.lineno} {node.name} {lengths[-1]}")
    for path in files:
        if lines[path] > LONG_FILE:
            print(f"  long file: {path.relative_to(PACKAGE)} {lines[path]}")
    lengths.sort()
    print(
        f"{len(files)} files, {sum(lines.values())} lines; {len(lengths)} functions, "
        f"median {statistics.median(lengths):.0f} lines, p95 {lengths[int(0.95 * len(lengths))]}, max {lengths[-1]}"
    )
    names = {path: path.relative_to(PACKAGE).as_posix().removesuffix(".py") for path in files}
    rooms = set(CORE_ROOMS.split())
    in_core = [path for path, name in names.items() if {name, name.partition("/")[0]} & rooms]
    print(f"core rooms: {sum(lines[path] for path in in_core):,} lines (at most {MOST_CORE_LINES:,})")
    most = {path: LONGEST.get(path.relative_to(PACKAGE).as_posix(), MOST_LINES) for path in files}
    return int(any(lines[path] > most[path] for path in files))


def length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a definition, without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


if __name__ == "__main__":
    sys.exit(main())
