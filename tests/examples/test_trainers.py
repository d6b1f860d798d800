"""The example trainers run, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.forking import Forks

EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = [name for name in ("trl", "matplotlib") if importlib.util.find_spec(name) is None]
LEARNING = ("--lr", "6e-4")
"""Twice the default: fewer steps show that it learns."""
PRETRAINING = ("--pretraining", "250")
"""Half of the default: one in six answers is right then, which leaves more to learn by reward."""
IMPORTS = ("transformers.models.llama.modeling_llama", "matplotlib.figure", "trl.trainer.grpo_trainer", "datasets")
SCRIPT = "import runpy, sys; sys.argv.pop(0); sys.path[0] = sys.argv[0].rpartition('/')[0]; " + (
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs the script in `sys.argv[1]` as `python SCRIPT …` does."""
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} (pip install '.[examples]')")


class Trainers:
    """Runs the examples, each in a child of a process that has imported what they use."""

    def __init__(self, forks: Forks, cache: Path) -> None:
        """The first run leaves the model that all begin with in `cache`: to teach it takes most of a short run."""
        self._forks, self._cache = forks, cache

    def run(self, script: str, *arguments: str) -> dict[str, Any]:
        """Run an example; return its last line, after what is true of each: it drew a plot, the logprobs agree."""
        with TemporaryDirectory() as directory:
            plot = Path(directory, "plot.png")
            places = ["--cache", str(self._cache), "--plot", str(plot)]
            done = self._forks.run(SCRIPT, EXAMPLES / script, *places, *PRETRAINING, *arguments)
            assert done.returncode == 0, done.stderr[-2000:]
            assert plot.read_bytes().startswith(b"\x89PNG")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert result["largest_mean"] < 1e-4
        return result


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with Forks(IMPORTS, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as forks:
        yield Trainers(forks, tmp_path_factory.mktemp("warm"))


def has_learned(result: dict[str, Any]) -> bool:
    """Return whether the last ten steps were better than the first ten by three standard errors."""
    error = math.hypot(result["first10_error"], result["last10_error"])
    return bool(result["last10"] - result["first10"] > 3 * error)


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_k_our_own_grpo_agrees_at_every_step_in_flight(how: str, trainers: Trainers) -> None:
    assert trainers.run("grpo.py", "--steps", "4", "--in-flight", how)["spanning"] > 0


@pytest.fixture(scope="module")
def forty_steps(trainers: Trainers) -> dict[str, Any]:
    """The last line of our own GRPO on one engine."""
    return trainers.run("grpo.py", "--steps", "40", *LEARNING)


def test_k_our_own_grpo_learns_and_agrees_at_every_step(forty_steps: dict[str, Any]) -> None:
    assert has_learned(forty_steps) and forty_steps["spanning"] == 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')")
def test_k_our_own_grpo_on_two_replicas_repeats_the_run_on_one(forty_steps: dict[str, Any], trainers: Trainers) -> None:
    """Ten steps, each after an update of both replicas: the same rewards as in the first ten of the run on one."""
    two = trainers.run("grpo.py", "--steps", "10", *LEARNING, "--replicas", "2")
    for name in ("first10", "first10_error"):
        assert two[name] == forty_steps[name]


def test_k_trls_grpo_learns_and_agrees_at_every_step(trainers: Trainers) -> None:
    result = trainers.run("trl_grpo.py", "--steps", "30", *LEARNING)
    assert has_learned(result) and result["in_flight"] >= 22


def test_k_trls_server_mode_learns_and_agrees_at_every_step(trainers: Trainers) -> None:
    result = trainers.run("trl_grpo.py", "--server", "--steps", "30", *LEARNING)
    assert has_learned(result) and result["updates"] == 30
