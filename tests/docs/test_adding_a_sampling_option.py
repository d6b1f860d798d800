"""The worked example of docs/adding-a-sampling-option.md: its diff, applied to a copy of the package, works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-sampling-option.md"

DRAWS = """
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.server.schema import ChatBody
engine = InferenceEngine(EngineConfig(model_path="calculator", num_threads=1))
def drawn(**options):
    return engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True, **options), 4)
(greedy, *_) = drawn(temperature=0)
assert {s.completion_tokens for s in drawn(seed=1, epsilon_cutoff=1.0)} == {greedy.completion_tokens}
asked = [s.completion_tokens for s in drawn(seed=1, temperature=3.0)]
cut = [s.completion_tokens for s in drawn(seed=1, temperature=3.0, epsilon_cutoff=0.02)]
assert asked != cut
body = {"messages": [{"role": "user", "content": "x"}], "epsilon_cutoff": 0.1}
assert ChatBody.model_validate(body).epsilon_cutoff == 0.1
"""
DRAWS_ON_RANKS = """
import dataclasses, sys
sys.path.insert(0, ".")
import torch
from nano_inference.executors.sampling import draw
from nano_inference.types import SamplingParams
from tests.parallel.test_vocabulary import drawn, row
rows = [
    one._replace(params=SamplingParams(temperature=2.0, epsilon_cutoff=cutoff))
    for one, cutoff in zip([row(number, __import__("random").Random(1)) for number in range(9)], [0, 0.002, 0.01] * 3)
]
logits = torch.randn(9, 1100, generator=torch.Generator().manual_seed(1)) * 3
plain = draw(logits.clone(), [one._replace(params=SamplingParams(temperature=2.0)) for one in rows])
right, mine = draw(logits.clone(), rows), drawn(logits, rows, 2)[0]
assert [one.tokens for one in mine] == [one.tokens for one in right] != [one.tokens for one in plain]
"""


def hunks() -> Iterator[tuple[str, str, str]]:
    """The diff's pieces: a file, its lines before, its lines after."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        name = part.partition("\n")[0]
        for hunk in re.split(r"^@@.*\n", part, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            yield name, before, "".join(line[1:] for line in lines if line[0] != "-")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the page's diff applied."""
    root = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "src" / "nano_inference", root / "src" / "nano_inference")
    for name, before, after in hunks():
        path = root / name
        text = path.read_text()
        assert text.count(before) == 1, f"the page's diff no longer fits {name}"
        path.write_text(text.replace(before, after))
    return root / "src"


def run(changed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(changed)}, cwd=ROOT, capture_output=True, text=True
    )


def test_option_touches_five_files() -> None:
    assert len({name for name, _, _ in hunks()}) == 5


def test_ranks_draw_what_one_process_does(changed: Path) -> None:
    done = run(changed, "-c", DRAWS_ON_RANKS)
    assert done.returncode == 0, done.stderr


def test_python_and_a_body_have_the_option(changed: Path) -> None:
    done = run(changed, "-c", DRAWS)
    assert done.returncode == 0, done.stderr


def test_the_command_line_has_it_and_its_limits(changed: Path) -> None:
    done = run(changed, "-m", "nano_inference", "generate", "1+1", "--model", "calculator", "--epsilon-cutoff", "2")
    assert (done.returncode, done.stderr) == (2, "nano-inference: --epsilon-cutoff must be in [0, 1], got 2.0\n")
