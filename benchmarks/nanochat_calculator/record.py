"""Record the answers of upstream's calculator, with the differences of this package's: writes answers.json.

python -m benchmarks.nanochat_calculator.record path/to/nanochat [--commit 92d63d4]   # karpathy/nanochat

Upstream evaluates Python code: run this only on the expressions of this package, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import resource
import subprocess
import sys
import types
from pathlib import Path

from benchmarks.nanochat_calculator.compare import ANSWERS, BLOCK, Answer, answer_of, block_digest, bound_of, texts
from nano_inference.nanochat.calculator import calculate

_MEMORY = 8 << 30
_ABSENT = ("rustbpe", "tiktoken", "wandb", "filelock")
"""Packages that the calculator does not need; replaced by empty modules if not installed."""


def main() -> int:
    """Record and return 0, or 1 if a difference is not explained by a documented bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", help="its commit, if it is not a repository")
    wish = parser.parse_args()
    checkout: Path = wish.checkout
    use_calculator = _upstreams(checkout)
    expressions = texts()
    answers = [answer_of(use_calculator(one)) for one in expressions]
    differing: dict[str, tuple[Answer, str]] = {}
    unexplained = []
    for text, theirs in zip(expressions, answers, strict=True):
        if answer_of(calculate(text)) != theirs:
            bound = bound_of(text, theirs)
            differing[text] = (theirs, bound or "")
            unexplained += [] if bound else [(text, theirs, calculate(text))]
    for row in unexplained:
        print("unexplained:", *(repr(one)[:200] for one in row))
    pairs = list(zip(expressions, answers, strict=True))
    record = {
        "commit": wish.commit or _commit(checkout),
        "python": platform.python_version(),
        "expressions": len(expressions),
        "answered": sum(answer is not None for answer in answers),
        "blocks": [block_digest(pairs[start : start + BLOCK]) for start in range(0, len(pairs), BLOCK)],
        "differing": {text: list(found) for text, found in differing.items()},
    }
    ANSWERS.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
    print(f"{len(expressions)} expressions, {record['answered']} answered, {len(differing)} differ")
    return 1 if unexplained else 0


def _upstreams(checkout: Path) -> types.FunctionType:
    """Import `use_calculator` from a checkout, under a limit of memory."""
    for name in _ABSENT:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    sys.path.insert(0, str(checkout))
    function: types.FunctionType = importlib.import_module("nanochat.engine").use_calculator
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    return function


def _commit(checkout: Path) -> str:
    """Return the checkout's commit, or "unknown" outside a repository."""
    found = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
