"""`examples/hello.py`, the smallest program, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "hello.py"


@pytest.mark.model
@pytest.mark.slow
def test_hello_prints_an_answer_and_a_log_probability_for_each_token() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    answer, *tokens = done.stdout.splitlines()
    assert answer == "The capital of France is Paris."
    found = [re.fullmatch(r" *(-?\d+\.\d{4})  ('.*')", line) for line in tokens]
    assert len(found) > 5 and all(one is not None and float(one[1]) <= 0 for one in found), tokens
