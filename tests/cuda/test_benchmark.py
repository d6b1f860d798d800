"""`benchmarks/cuda.py`: a dry run measures every model, and no unit can end the others."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cuda_parts.device_tests import compare
from benchmarks.cuda_parts.engines import workload
from benchmarks.cuda_parts.models import SHAPES, Bench, config_of
from benchmarks.cuda_parts.report import Report, Sink, Unit, open_bench, run_unit
from nano_inference.models import dense

ROOT = Path(__file__).parents[2]
MODELS = ("Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-7B")


@pytest.mark.slow
def test_a_dry_run_measures_every_model(tmp_path: Path) -> None:
    out = tmp_path / "cuda.json"
    command = [sys.executable, "benchmarks/cuda.py", "--dry", "--only", "engine,ceilings", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["is_dry"] and report["device"] == "CPU" and report["torch"]
    figures = report["figures"]
    assert all(one.keys() >= {"section", "name", "value", "unit"} for one in figures)
    assert [one["section"] for one in figures[:4]] == ["ceilings"] * 3 + ["engine"]
    assert [one["name"] for one in figures[3:5]] == ["bench.py, first run, Qwen2.5-0.5B", "bench.py, Qwen2.5-0.5B"]
    by_name = {one["name"]: one for one in figures}
    for model in MODELS:
        for kind in ("bench.py", "one request"):
            figure = by_name[f"{kind}, {model}"]
            assert figure["unit"] == "tokens/s" and min(figure[key] for key in ("value", "bar", "roofline")) > 0
            assert figure["of roofline"] == figure["value"] / figure["roofline"]
            assert figure.get("stretch", math.inf) > figure["bar"] and ("stretch" in figure) == (kind == "bench.py")
    assert by_name["ratio of the two, Qwen2.5-0.5B"]["bar"] == 1.5
    assert by_name["longest tick with an update, Qwen2.5-0.5B"]["bar"] > 0
    assert len([line for line in done.stdout.splitlines() if line.startswith("dry ")]) == len(figures)


def refuse() -> None:
    raise ValueError


def raises(bench: Bench, sink: Sink) -> None:
    sink.add("first", 1.0, "GB/s")
    sink.attempt("second", refuse)
    raise RuntimeError("CUDA error\nand more lines")


def ends(bench: Bench, sink: Sink) -> None:
    os._exit(3)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("measure", "seconds", "values", "has_failed"),
    [
        (raises, 60.0, [1.0, "failed: ValueError: ", "failed: RuntimeError: CUDA error"], True),
        (ends, 60.0, ["failed: the process ended with 3"], True),
    ],
)  # fmt: skip
def test_a_unit_that_fails_is_one_line_of_the_report(
    measure: object, seconds: float, values: list[object], has_failed: bool, tmp_path: Path
) -> None:
    report = Report(is_dry=True, out=tmp_path / "cuda.json")
    run_unit(Unit("engine", "model", measure), report, time.monotonic() + seconds)  # type: ignore[arg-type]
    assert [one["value"] for one in report.figures] == values
    assert json.loads((tmp_path / "cuda.json").read_text())["figures"] == report.figures
    assert all("in refuse" in one["trace"] for one in report.figures if one["name"] == "second")
    assert report.has_failed is has_failed


def test_the_workload_is_that_of_the_published_script() -> None:
    bench = open_bench(is_dry=True)
    whole = Bench(device=bench.device, kernels=bench.kernels, dtype=bench.dtype, is_dry=False)
    prompts, sizes = workload(whole, 151_936)
    assert (sum(map(len, prompts)), sum(sizes)) == (142_827, 133_966)


@pytest.mark.parametrize(("name", "billions"), list(zip(MODELS, (0.494, 0.596, 1.236, 7.616), strict=True)))
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    program = dense.program(config_of(SHAPES[name]))
    assert round(sum(math.prod(spec.shape) for spec in program.weights) / 1e9, 3) == billions


class Pipe:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.found: list[dict[str, object]] = []

    def send(self, figure: dict[str, object]) -> None:
        self.found.append(figure)


def test_kernels_are_compared_without_pytest() -> None:
    pipe = Pipe()
    compare(open_bench(is_dry=True), Sink("tests", pipe, {}, 0.0))  # type: ignore[arg-type]
    assert [one["value"] for one in pipe.found] == ["3 of 3 are right"]
