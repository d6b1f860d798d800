"""Print the size of the package and of its core, and how long its functions are. Fails if a file has over 450 lines."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "nano_inference"
LONG_FILE, MOST_LINES, LONG_FUNCTION = 350, 450, 40
CORE_ROOMS = {
    *(
        "types",
        "samples",
        "config",
        "checks",
        "admission",
        "requests",
        "sequence",
        "appending",
        "scheduling",
        "kv",
        "seeds",
    ),
    *("matching", "drafts", "speculation", "runner", "core", "recovery", "state", "exclusive", "calls"),
    *("control", "engine", "engine_thread", "async_engine"),
}
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
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
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
    in_core = [path for path in files if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in CORE_ROOMS]
    print(f"core rooms: {sum(lines[path] for path in in_core):,} lines (at most {MOST_CORE_LINES:,})")
    return int(max(lines.values()) > MOST_LINES)


if __name__ == "__main__":
    sys.exit(main())
