"""Every kernel against float64 on a CPU, in Triton's interpreter.

One process with `TRITON_INTERPRET=1` runs all cases: Triton reads the variable when a kernel is defined.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import executor_cases

ROOT = Path(__file__).parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="NO TRITON: pip install -e '.[aot]' (286 MB)"),
]


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.nightly)])
def differences(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[float | str, float, float]]:
    """The difference (or exception), the bound and the seconds of each case."""
    models = tmp_path_factory.mktemp("models")
    executor_cases.write_models(models)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.cuda.interpret", "--models", str(models)]
    command += ["--few"] if request.param == "few" else []
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return {name: tuple(values) for name, values in json.loads(done.stdout).items()}  # type: ignore[misc]


@pytest.mark.parametrize(
    "prefix", ["adapters", "attention", "fused", "linear", "pointwise", "refusals", "sampler", "states", "executor"]
)
def test_kernels_match_float64(prefix: str, differences: dict[str, tuple[float | str, float, float]]) -> None:
    part = {name: values for name, values in differences.items() if name.startswith(prefix)}
    assert part
    wrong = {name: found for name, (found, bound, _) in part.items() if isinstance(found, str) or not found <= bound}
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
