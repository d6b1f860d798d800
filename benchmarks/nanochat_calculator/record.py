"""Records the answers of upstream's calculator in answers.json, with the differences of this package's."""

from __future__ import annotations

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


def record(checkout: Path, commit: str | None) -> int:
    """Record; return 1 if a difference is not explained by a documented bound. Limits this process's memory."""
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
    recorded = {
        "commit": commit or _commit(checkout),
        "python": platform.python_version(),
        "expressions": len(expressions),
        "answered": sum(answer is not None for answer in answers),
        "blocks": [block_digest(pairs[start : start + BLOCK]) for start in range(0, len(pairs), BLOCK)],
        "differing": {text: list(found) for text, found in differing.items()},
    }
    ANSWERS.write_text(json.dumps(recorded, indent=0) + "\n", encoding="utf-8")
    print(f"{len(expressions)} expressions, {recorded['answered']} answered, {len(differing)} differ")
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
