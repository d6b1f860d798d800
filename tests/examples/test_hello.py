"""`examples/hello.py`, the smallest program: short, run as a user runs it, and shown in the README as it is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks_of

SCRIPT = ROOT / "examples" / "hello.py"


@pytest.mark.model
def test_hello_prints_an_answer_and_a_log_probability_for_each_token() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    answer, *tokens = done.stdout.splitlines()
    assert answer == "The capital of France is Paris."
    found = [re.fullmatch(r" *(-?\d+\.\d{4})  ('.*')", line) for line in tokens]
    assert len(found) > 5 and all(one is not None and float(one[1]) <= 0 for one in found), tokens


def test_hello_has_fewer_than_30_lines() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 30


def test_the_readme_shows_hello_unchanged() -> None:
    code = SCRIPT.read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert code in [block.text for block in blocks_of(ROOT / "README.md") if block.language == "python"]
