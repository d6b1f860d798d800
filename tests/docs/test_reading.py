"""docs/reading.md: opening an engine and one `generate()` execute the listed files and black boxes only."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.docs.pages import ROOT
from tests.models.families import make_model

HOME = ROOT / "src" / "nano_inference"
READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
FILES = re.findall(r"^\| \d+ \| `([\w/.]+\.py)` \|", READING, re.MULTILINE)
BLACK_BOXES = re.findall(r"^\| `([\w/.]+)` \| [^|]+ \|$", READING, re.MULTILINE)
RECORDS = {"core/step.py"}
"""A listed file without functions."""
Kernels = Literal["auto", "off"]


def traced(work: Callable[[], Any]) -> tuple[set[str], Any]:
    """Return the package's files whose functions `work` executes, and its result."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not a module's or a class's body
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return {Path(file).relative_to(HOME).as_posix() for file in files if Path(file).is_relative_to(HOME)}, result


def is_in_a_black_box(name: str) -> bool:
    return any(name == box or name.startswith(f"{box}/") or name == f"{box}.py" for box in BLACK_BOXES)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_list_is_what_runs(kernels: Kernels, tmp_path: Path) -> None:
    make_model("qwen3-ratio3-tied", tmp_path)
    prompt, params = [5, 9, 30, 2, 44, 17, 80, 3], SamplingParams(max_tokens=8, ignore_eos=True)
    config = EngineConfig(str(tmp_path), device="cpu", kernels=kernels, kv_cache_bytes=4 << 20)
    opening, engine = traced(lambda: InferenceEngine(config))
    with engine:
        generating, _ = traced(lambda: engine.generate([prompt], params, 2))
    executed = opening | generating
    assert sorted(name for name in executed if name not in FILES and not is_in_a_black_box(name)) == []
    sampler = {"executors/sampling.py"} if kernels == "auto" else set()  # the kernels sample in C
    assert set(FILES) - generating <= RECORDS | sampler
