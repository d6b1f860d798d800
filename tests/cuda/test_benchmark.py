"""`benchmarks/cuda.py --dry`: every line of the engine section runs, and bad arguments are refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/cuda.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_engine_section_measures_every_model(tmp_path: Path) -> None:
    out = tmp_path / "cuda.json"
    done = run("--dry", "--only", "engine", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [one["name"] for one in json.loads(out.read_text())["figures"]]
    for model in ("Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-7B"):
        assert f"bench.py, {model}" in names and f"one request, {model}" in names
    assert names[0] == "bench.py, Qwen2.5-0.5B" and "16 samples a prompt, Qwen2.5-0.5B" in names


def test_sections_that_would_start_too_late_are_named() -> None:
    done = run("--dry", "--seconds", "0", "--only", "ceilings,tests")
    assert "skipped" in done.stdout and done.returncode == 0


def test_an_unknown_section_is_refused_in_one_line() -> None:
    done = run("--dry", "--only", "engines")
    assert done.returncode == 1
    assert done.stderr == "--only: there is no section engines; there are ceilings, engine, kernels, profile, tests\n"
