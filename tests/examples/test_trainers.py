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
STEPS = ("--steps", "20")  # the first ten are compared with the last ten
TRLS_LR = ("--lr", "6e-4")  # twice the default: one step of the optimizer for each batch, and grpo.py makes two
IMPORTS = (
    *("transformers.models.llama.modeling_llama", "matplotlib.backends.backend_agg", "trl.trainer.grpo_trainer"),
    *("datasets", "nano_inference.build", "nano_inference.rl.pool"),
)
SCRIPT = "import runpy, sys; sys.argv.pop(0); sys.path[0] = sys.argv[0].rpartition('/')[0]; " + (
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs the script in `sys.argv[1]` as `python SCRIPT …` does."""
TEACH = "import sys; from tests.examples.taught import teach; teach(sys.argv[1])"
LOSS = "import sys; from tests.examples.taught import loss_of; print(loss_of(sys.argv[1]))"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} (pip install '.[examples]')"),
]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A process that has imported what the examples use."""
    with Forks(IMPORTS, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as forks:
        yield forks


def printed(forks: Forks, code: str, *arguments: object) -> str:
    """Return what code prints in a child."""
    done = forks.run(code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run(forks: Forks, script: str, model: Path, *arguments: str) -> dict[str, Any]:
    """Run an example; return its last line, after what is true of each: it drew a plot, the logprobs agree."""
    with TemporaryDirectory() as directory:
        plot = Path(directory, "plot.png")
        out = printed(forks, SCRIPT, EXAMPLES / script, "--cache", model, "--plot", plot, *arguments)
        assert plot.read_bytes().startswith(b"\x89PNG")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["largest_mean"] < 1e-4
    return result


def has_learned(result: dict[str, Any]) -> bool:
    """Return whether the last ten steps were better than the first ten by three standard errors."""
    error = math.hypot(result["first10_error"], result["last10_error"])
    return bool(result["last10"] - result["first10"] > 3 * error)


@pytest.mark.parametrize("how", ["keep", pytest.param("recompute", marks=pytest.mark.nightly)])
def test_k_our_own_grpo_agrees_at_every_step_in_flight(how: str, forks: Forks, tmp_path: Path) -> None:
    result = run(forks, "grpo.py", tmp_path, "--pretraining", "20", "--steps", "4", "--in-flight", how)
    assert result["spanning"] > 0
    assert float(printed(forks, LOSS, tmp_path)) < 2.0, "the supervised start taught nothing"  # at first 2.6


@pytest.fixture(scope="module")
def taught(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model that soon learns by reward: what the examples start with takes longer to teach."""
    directory = tmp_path_factory.mktemp("taught")
    printed(forks, TEACH, directory)
    return directory


def test_k_our_own_grpo_learns_and_agrees_at_every_step(forks: Forks, taught: Path) -> None:
    result = run(forks, "grpo.py", taught, *STEPS)
    assert has_learned(result) and result["spanning"] == 0


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')")
def test_k_our_own_grpo_on_two_replicas_repeats_the_run_on_one(forks: Forks, taught: Path) -> None:
    """Ten steps, each after an update of both replicas: the same rewards as on one engine."""
    one, two = (run(forks, "grpo.py", taught, "--steps", "10", *more) for more in ((), ("--replicas", "2")))
    for name in ("first10", "first10_error"):
        assert two[name] == one[name]


def test_k_trls_grpo_learns_and_agrees_at_every_step(forks: Forks, taught: Path) -> None:
    result = run(forks, "trl_grpo.py", taught, *STEPS, *TRLS_LR)
    assert has_learned(result) and result["in_flight"] >= 12


@pytest.mark.nightly
def test_k_trls_grpo_of_a_lora_learns_alike_with_less_to_send(forks: Forks, taught: Path) -> None:
    pytest.importorskip("peft")
    options = ("--steps", "10", "--lr", "2e-3")
    adapter, merged = (run(forks, "trl_grpo.py", taught, "--lora", how, *options) for how in ("adapter", "merged"))
    assert adapter["first10"] == pytest.approx(merged["first10"], abs=0.05)
    assert 0 < 6 * adapter["bytes"] < merged["bytes"]


def test_k_trls_server_mode_agrees_at_every_step(forks: Forks, taught: Path) -> None:
    assert run(forks, "trl_grpo.py", taught, "--server", "--steps", "5", *TRLS_LR)["updates"] == 5
