"""The first evening's list: its files are as long as it says, and one `generate()` executes nothing else."""

from __future__ import annotations

import ast
import re
from typing import Literal, NamedTuple, get_args

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.docs.pages import ROOT
from tests.docs.tracing import traced
from tests.models.families import make_model
from tests.test_rooms import HOME

READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
FILES = {
    name: int(lines) for name, lines in re.findall(r"^\| \d+ \| `([\w/.]+\.py)` \| (\d+) \|", READING, re.MULTILINE)
}
BLACK_BOXES = re.findall(r"^\| `([\w/.]+)` \| [^|]+ \|$", READING, re.MULTILINE)
MOST_FILES, MOST_LINES = 9, 2600
END = "    # ---- pause and sleep"
"""The first evening ends at this line of engine.py."""
Kernels = Literal["auto", "off"]
PATHS: tuple[Kernels, ...] = get_args(Kernels)


def length(name: str) -> int:
    lines = (HOME / name).read_text(encoding="utf-8").splitlines()
    return next((index for index, line in enumerate(lines) if line.startswith(END)), len(lines))


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


class Executed(NamedTuple):
    """Files of the package that ran: while an engine was opened, and in one `generate()`."""

    opening: frozenset[str]
    generating: frozenset[str]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executed]:
    """What runs with the CPU kernels and in PyTorch."""
    directory = tmp_path_factory.mktemp("reading")
    make_model("qwen3-ratio3-tied", directory)
    prompt, params = [5, 9, 30, 2, 44, 17, 80, 3], SamplingParams(max_tokens=8, ignore_eos=True)
    found = {}
    for kernels in PATHS:
        config = EngineConfig(str(directory), device="cpu", kernels=kernels, kv_cache_bytes=4 << 20)
        opening, engine = traced(lambda config=config: InferenceEngine(config))
        with engine:
            generating, samples = traced(lambda engine=engine: engine.generate([prompt], params, 2))
        assert len(samples) == 2
        found[kernels] = Executed(frozenset(opening), frozenset(generating))
    return found


@pytest.mark.parametrize("kernels", PATHS)
def test_nothing_else_is_executed(executed: dict[str, Executed], kernels: Kernels) -> None:
    files = executed[kernels].opening | executed[kernels].generating
    assert not sorted(name for name in files if name not in FILES and not is_in_a_black_box(name))


def functions_in(tree: ast.Module) -> list[str]:
    """Return the functions and methods of a module, without those of protocols."""
    protocols = [
        one for one in tree.body if isinstance(one, ast.ClassDef) and "Protocol" in map(ast.unparse, one.bases)
    ]
    stubs = {id(node) for one in protocols for node in ast.walk(one)}
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and id(node) not in stubs]


WITH_CODE = [name for name in FILES if functions_in(ast.parse((HOME / name).read_text(encoding="utf-8")))]


def test_only_the_records_of_a_step_have_no_code() -> None:
    assert set(FILES) - set(WITH_CODE) == {"core/step.py"}


@pytest.mark.parametrize("name", WITH_CODE)
def test_listed_file_is_executed_by_generate(executed: dict[str, Executed], name: str) -> None:
    assert any(name in one.generating for one in executed.values()), "the list is about what runs"
