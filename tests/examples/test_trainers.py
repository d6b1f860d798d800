"""The example trainers, run as a user runs them, only shorter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = [name for name in ("trl", "matplotlib") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} (pip install '.[examples]')")


def run(script: str, directory: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run an example; return its last line and all it printed."""
    plot = directory / "plot.png"
    command = [sys.executable, str(EXAMPLES / script), "--plot", str(plot), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert plot.read_bytes().startswith(b"\x89PNG")
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.parametrize("how", [(), ("--in-flight",), ("--in-flight", "recompute")])
def test_k_our_own_grpo_agrees_at_every_step(how: tuple[str, ...], tmp_path: Path) -> None:
    result, _ = run("grpo.py", tmp_path, "--steps", "12", *how)
    assert result["largest_mean"] < 1e-4
    assert (result["spanning"] > 0) == bool(how)


def test_k_our_own_grpo_learns(tmp_path: Path) -> None:
    result, _ = run("grpo.py", tmp_path, "--steps", "40")
    error = (result["first10_error"] ** 2 + result["last10_error"] ** 2) ** 0.5
    assert result["last10"] - result["first10"] > 3 * error


def test_k_trls_grpo_learns_and_agrees_at_every_step(tmp_path: Path) -> None:
    result, _ = run("trl_grpo.py", tmp_path, "--steps", "40")
    error = (result["first10_error"] ** 2 + result["last10_error"] ** 2) ** 0.5
    assert result["largest_mean"] < 1e-4
    assert result["in_flight"] >= 30
    assert result["last10"] - result["first10"] > 3 * error


def test_k_trls_server_mode_learns_and_agrees_at_every_step(tmp_path: Path) -> None:
    result, _ = run("trl_grpo.py", tmp_path, "--server", "--steps", "40")
    error = (result["first10_error"] ** 2 + result["last10_error"] ** 2) ** 0.5
    assert result["largest_mean"] < 1e-4
    assert result["updates"] == 40
    assert result["last10"] - result["first10"] > 3 * error
