"""The first evening's list: its files are as long as it says, and one `generate()` executes nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.structure import traced
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.docs.pages import ROOT
from tests.models.families import make_model
from tests.test_rooms import HOME

READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
FILES = {
    name: int(lines) for name, lines in re.findall(r"^\| \d+ \| `([\w/.]+\.py)` \| (\d+) \|", READING, re.MULTILINE)
}
BLACK_BOXES = re.findall(r"^\| `([\w/.]+)` \| [^|]+ \|$", READING, re.MULTILINE)
MOST_FILES, MOST_LINES = 14, 3200


def length(name: str) -> int:
    return len((HOME / name).read_text(encoding="utf-8").splitlines())


def is_in_a_black_box(name: str) -> bool:
    return any(name == box or name.startswith(f"{box}/") or name == f"{box}.py" for box in BLACK_BOXES)


def test_an_evening_is_long_enough() -> None:
    assert 0 < len(FILES) <= MOST_FILES
    assert sum(map(length, FILES)) <= MOST_LINES


def test_line_counts_are_those_of_the_files() -> None:
    assert {name: length(name) for name in FILES} == FILES
    assert f"{sum(FILES.values()):,} lines" in READING and f"{len(FILES)} files" in READING


def test_black_boxes_exist_and_are_not_in_the_list() -> None:
    assert BLACK_BOXES
    for box in BLACK_BOXES:
        assert (HOME / box).is_dir() or (HOME / f"{box}.py").is_file(), box
    assert not [name for name in FILES if is_in_a_black_box(name)]


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_nothing_else_is_executed(kernels: str, tmp_path: Path) -> None:
    make_model("qwen3-ratio3-tied", tmp_path)
    config = EngineConfig(model_path=str(tmp_path), device="cpu", kernels=kernels, kv_cache_bytes=4 << 20)
    prompt, params = [5, 9, 30, 2, 44, 17, 80, 3], SamplingParams(max_tokens=8, ignore_eos=True)
    opening, engine = traced(lambda: InferenceEngine(config))
    with engine:
        asking, samples = traced(lambda: engine.generate([prompt], params, 2))
    assert len(samples) == 2
    executed = {Path(file).relative_to(HOME).as_posix() for file, _, _ in opening.functions | asking.functions}
    assert not sorted(name for name in executed if name not in FILES and not is_in_a_black_box(name))
    asked = {Path(file).relative_to(HOME).as_posix() for file, _, _ in asking.functions}
    assert len(asked & set(FILES)) >= 8, "the list is about what runs"
