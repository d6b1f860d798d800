"""Record what upstream's calculator answers to the expressions of tests/text/upstream_calculator.json.

    python benchmarks/calculator_answers.py PATH/nanochat

Prints each difference from this package's calculator that no documented bound explained before: give its row a bound,
or mend the calculator. Upstream evaluates Python code, so the process has a limit of memory.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import resource
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

from nano_inference.nanochat.calculator import calculate

ANSWERS = Path(__file__).parents[1] / "tests" / "text" / "upstream_calculator.json"
MEMORY = 8 << 30
PLAIN = (int, float, bool, str, bytes, complex, list, tuple, types.EllipsisType)


def answer_of(value: Any) -> str | None:
    """Return a value as it is recorded: its type and repr, a digest if that is long, only the type of an object."""
    if value is None:
        return None
    if not isinstance(value, PLAIN):
        return f"{type(value).__name__}: object"
    text = "too many digits"
    with suppress(ValueError):
        text = repr(value)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{type(value).__name__}: {text if len(text) <= 512 else digest}"


def main() -> int:
    """Record; return 1 if a difference is new."""
    for name in ("rustbpe", "tiktoken", "wandb", "filelock"):  # imported by upstream, not used by its calculator
        with suppress(ImportError):
            importlib.import_module(name)
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.path.insert(0, sys.argv[1])
    use_calculator = importlib.import_module("nanochat.engine").use_calculator
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    rows, new = [], 0
    for text, _, bound in json.loads(ANSWERS.read_text()):
        theirs = answer_of(use_calculator(text))
        is_equal = answer_of(calculate(text)) == theirs
        if not is_equal and not bound:
            print(f"differs: {text[:200]!r}: {theirs!r}, here {calculate(text)!r}")
            new += 1
        rows.append([text, theirs, None if is_equal else bound])
    ANSWERS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(f"{len(rows)} expressions, {sum(row[1] is not None for row in rows)} answered, {new} differ without a bound")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
