"""Count the files, functions and records that one `generate()` uses, including assembly, on each path.

    python benchmarks/structure.py [--model NAME]

A profiler notes every Python function of the package that is called while an engine is opened and one prompt is
answered. A record is a dataclass or a named tuple of the package that is built between the call and its result.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import nano_inference
from nano_inference import EngineConfig, InferenceEngine, SamplingParams

HOME = Path(nano_inference.__file__).parent
PATHS = {"C path": "auto", "torch path": "off"}


@dataclass
class Trace:
    """What was seen so far."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)
    records: dict[str, None] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; for `sys.setprofile`."""
        if event != "call":
            return
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # and not the body of a module or class that is imported
        if is_function and code.co_filename.startswith(str(HOME)):
            self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
        made = frame.f_locals.get("_cls")  # of a named tuple's constructor, which is a lambda
        if made is None and code.co_name == "__init__":
            made = type(frame.f_locals.get("self"))
        is_record = is_dataclass(made) or hasattr(made, "_fields")
        if is_record and made.__module__.startswith("nano_inference"):
            self.records[made.__qualname__] = None


def traced(work: Callable[[], Any]) -> tuple[Trace, Any]:
    """Return what `work` executes, and its result."""
    trace = Trace()
    sys.setprofile(trace)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return trace, result


def show(name: str, config: EngineConfig) -> None:
    """Print what one prompt's answer executes, without and with the opening of the engine."""
    opening, engine = traced(lambda: InferenceEngine(config))
    prompt, params = list(range(100, 140)), SamplingParams(max_tokens=8, ignore_eos=True)
    with engine:
        asking, _ = traced(lambda: engine.generate([prompt], params))
    whole = opening.functions | asking.functions
    for part, functions in (("generate", asking.functions), ("opening and generate", whole)):
        files = sorted({file for file, _, _ in functions})
        num_lines = sum(len(Path(file).read_text().splitlines()) for file in files)
        print(f"{name}, {part}: {len(files)} files of {num_lines} lines, {len(functions)} functions")
        print("  " + " ".join(str(Path(file).relative_to(HOME)) for file in files))
    print(f"{name}: {len(asking.records)} records: {' '.join(asking.records)}")


def main() -> None:
    """Show both paths, and the lines of every room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    model = parser.parse_args().model
    for name, kernels in PATHS.items():
        show(name, EngineConfig(model_path=model, kernels=kernels, seed=0))
    rooms = Counter(file.relative_to(HOME).parts[0] for file in HOME.rglob("*.py") for _ in file.open())
    print("lines of rooms: " + " ".join(f"{room} {count}" for room, count in sorted(rooms.items())))


if __name__ == "__main__":
    main()
