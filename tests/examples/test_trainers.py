"""The example trainers run, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = [name for name in ("trl", "matplotlib") if importlib.util.find_spec(name) is None]
LEARNING = ("--lr", "6e-4")
"""Twice the default: fewer steps show that it learns."""
PRETRAINING = ("--pretraining", "250")
"""Half of the default: one in six answers is right then, which leaves more to learn by reward."""
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} (pip install '.[examples]')")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first run leaves the model that all begin with: to teach it takes most of a short run."""
    return tmp_path_factory.mktemp("warm")


def run(script: str, cache: Path, *arguments: str) -> dict[str, Any]:
    """Run an example; return its last line, after what is true of each: it drew a plot, and the logprobs agree."""
    with TemporaryDirectory() as directory:
        plot = Path(directory, "plot.png")
        places = ["--cache", str(cache), "--plot", str(plot)]
        command = [sys.executable, str(EXAMPLES / script), *places, *PRETRAINING, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
        assert plot.read_bytes().startswith(b"\x89PNG")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["largest_mean"] < 1e-4
    return result


def has_learned(result: dict[str, Any]) -> bool:
    """Return whether the last ten steps were better than the first ten by three standard errors."""
    error = math.hypot(result["first10_error"], result["last10_error"])
    return bool(result["last10"] - result["first10"] > 3 * error)


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_k_our_own_grpo_agrees_at_every_step_in_flight(how: str, cache: Path) -> None:
    assert run("grpo.py", cache, "--steps", "4", "--in-flight", how)["spanning"] > 0


@pytest.fixture(scope="module")
def forty_steps(cache: Path) -> dict[str, Any]:
    """The last line of our own GRPO on one engine."""
    return run("grpo.py", cache, "--steps", "40", *LEARNING)


def test_k_our_own_grpo_learns_and_agrees_at_every_step(forty_steps: dict[str, Any]) -> None:
    assert has_learned(forty_steps) and forty_steps["spanning"] == 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')")
def test_k_our_own_grpo_on_two_replicas_repeats_the_run_on_one(forty_steps: dict[str, Any], cache: Path) -> None:
    """Ten steps, each after an update of both replicas: the same rewards as in the first ten of the run on one."""
    two = run("grpo.py", cache, "--steps", "10", *LEARNING, "--replicas", "2")
    for name in ("first10", "first10_error"):
        assert two[name] == forty_steps[name]


def test_k_trls_grpo_learns_and_agrees_at_every_step(cache: Path) -> None:
    result = run("trl_grpo.py", cache, "--steps", "30", *LEARNING)
    assert has_learned(result) and result["in_flight"] >= 22


def test_k_trls_server_mode_learns_and_agrees_at_every_step(cache: Path) -> None:
    result = run("trl_grpo.py", cache, "--server", "--steps", "30", *LEARNING)
    assert has_learned(result) and result["updates"] == 30
