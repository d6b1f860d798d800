"""`benchmarks/cuda.py`: a dry run measures every model, and no unit can end the others."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.cuda_parts import report as reporting
from benchmarks.cuda_parts import timing
from benchmarks.cuda_parts.engines import workload
from benchmarks.cuda_parts.models import SHAPES, Bench, config_of
from benchmarks.cuda_parts.report import Report, Sink, Unit, open_bench, run_unit
from nano_inference.models import dense
from tests.forking import Forks

ROOT = Path(__file__).parents[2]
MODELS = ("Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-7B")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs the script with arguments in a process that has imported torch already."""
    code = (
        "import runpy, sys; sys.path.insert(0, 'benchmarks'); runpy.run_path('benchmarks/cuda.py', run_name='__main__')"
    )
    with Forks(["benchmarks.cuda_parts.sections"]) as forks:
        yield partial(forks.run, code)


def test_a_dry_run_measures_every_model(tmp_path: Path) -> None:
    out = tmp_path / "cuda.json"
    command = [sys.executable, "benchmarks/cuda.py", "--dry", "--only", "engine,ceilings,nanochat", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["is_dry"] and report["figures"][0]["value"] == "CPU" and report["torch"]
    figures = report["figures"]
    assert all(one.keys() >= {"section", "name", "value", "unit"} for one in figures)
    assert [one["section"] for one in figures[:5]] == ["ceilings"] * 4 + ["engine"]
    assert [one["name"] for one in figures[4:6]] == ["bench.py, first run, Qwen2.5-0.5B", "bench.py, Qwen2.5-0.5B"]
    by_name = {one["name"]: one for one in figures}
    for model in MODELS:
        for kind in ("bench.py", "one request"):
            figure = by_name[f"{kind}, {model}"]
            assert figure["unit"] == "tokens/s" and min(figure[key] for key in ("value", "bar", "roofline")) > 0
            assert figure["of roofline"] == figure["value"] / figure["roofline"]
    for kind, bar in (("16 samples of 16 prompts", 1.5), ("64 samples of 4 prompts", 2.5)):
        assert by_name[f"{kind}, Qwen2.5-0.5B"]["bar"] == bar and by_name[f"{kind}, Qwen2.5-0.5B"]["ratio"] > 0
    for kind, bar in (("bench.py", 0.9), ("one request", 0.95)):
        plain, exact = (by_name[f"{one}{kind}, Qwen2.5-0.5B"] for one in ("", "deterministic "))
        assert exact["bar"] == bar and exact["of not deterministic"] == exact["value"] / plain["value"]
    rate, copy = by_name["bench.py, Qwen3-0.6B"], by_name["copy"]["value"]
    assert rate["per GB/s"] == pytest.approx(rate["value"] / copy) and rate["bar per GB/s"] == 6
    for depth in ("d12", "d20"):
        assert by_name[f"prompt of 244 tokens, {depth}"]["MFU"] > 0
        assert min(by_name[f"8 rows, {depth}"][key] for key in ("value", "ms to the first", "MBU", "MFU")) > 0
    assert by_name["longest tick with an update, Qwen2.5-0.5B"]["bar"] > 0
    assert len([line for line in done.stdout.splitlines() if line.startswith("dry ")]) == len(figures)


def test_what_no_time_is_left_for_is_named(run: Run) -> None:
    done = run("--dry", "--seconds", "0", "--only", "ceilings,engine")
    assert done.stdout.count("skipped: no time is left") == 7 and done.returncode == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--only", "engines"), "--only: there is no section engines; there are ceilings, engine, kernels, profile,"),
        (("--peers", "nowhere"), "--peers: nowhere is not a directory"),
        (("--model", "Qwen4"), "--model: there is no model Qwen4; there are Qwen2.5-0.5B,"),
    ],
)
def test_an_unknown_name_is_refused_in_one_line(run: Run, options: tuple[str, ...], error: str) -> None:
    done = run("--dry", *options)
    assert done.returncode == 1 and done.stderr.startswith(error) and done.stderr.count("\n") == 1


def test_one_model_is_measured_alone(run: Run) -> None:
    done = run("--dry", "--seconds", "0", "--only", "ceilings,engine,kernels", "--model", "Qwen2.5-0.5B")
    names = [line.split(" · ")[0].split()[2] for line in done.stdout.splitlines() if line.startswith("dry ")]
    assert names == ["ceilings", "Qwen2.5-0.5B", "deterministic", "groups", "Qwen2.5-0.5B"]


def test_peers_are_measured_on_the_same_requests(tmp_path: Path) -> None:
    """Transformers is; environments whose Python is a script; one without a checkpoint's engine is named."""
    for engine in ("vllm", "flashinfer"):
        python = tmp_path / engine / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\ncat >/dev/null\necho loading\necho 0.5\n")
        python.chmod(0o755)
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    command = [sys.executable, "benchmarks/cuda.py", "--dry", "--only", "kernels,peers", "--peers", str(tmp_path)]
    out = tmp_path / "cuda.json"
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())["figures"]
    found = {one["name"]: one["value"] for one in figures}
    _, sizes = workload(open_bench(is_dry=True), 160)
    assert found["Transformers, Qwen2.5-0.5B"] > 0 and found["vllm, Qwen2.5-0.5B"] == sum(sizes) / 0.5
    attention = "decode attention, 4 x 300, Qwen2.5-0.5B"
    (theirs,) = (one for one in figures if one["name"] == f"flashinfer, {attention}")
    assert theirs["value"] == 5e5 and theirs["ours is"] == 5e5 / found[attention]
    assert found["nano-vllm, Qwen2.5-0.5B"] == f"skipped: no {tmp_path / 'nano-vllm' / 'bin' / 'python'}"


def refuse() -> None:
    raise ValueError


def raises(bench: Bench, sink: Sink) -> None:
    sink.add("first", 1.0, "GB/s")
    sink.attempt("second", refuse)
    raise RuntimeError("CUDA error\nand more lines")


def ends(bench: Bench, sink: Sink) -> None:
    os._exit(3)


def hangs(bench: Bench, sink: Sink) -> None:
    sink.add("first", 1.0)
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("measure", "seconds", "values", "has_failed"),
    [
        (raises, 60.0, [1.0, "failed: ValueError: ", "failed: RuntimeError: CUDA error"], True),
        (ends, 60.0, ["failed: the process ended with 3"], True),
        (hangs, 1.0, [1.0, "stopped after 1 s"], False),
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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_unit_that_hangs_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "UNIT_SECONDS", 1.0)
    report = Report(is_dry=True, out=None)
    run_unit(Unit("engine", "model", hangs), report, time.monotonic() + 60)
    assert [one["value"] for one in report.figures] == [1.0, "stopped after 1 s"]


def test_the_workload_is_that_of_the_published_script() -> None:
    bench = open_bench(is_dry=True)
    whole = Bench(device=bench.device, kernels=bench.kernels, dtype=bench.dtype, is_dry=False)
    prompts, sizes = workload(whole, 151_936)
    assert (sum(map(len, prompts)), sum(sizes)) == (142_827, 133_966)


@pytest.mark.parametrize(("name", "billions"), list(zip(MODELS, (0.494, 0.596, 1.236, 7.616), strict=True)))
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    program = dense.program(config_of(SHAPES[name]))
    assert round(sum(math.prod(spec.shape) for spec in program.weights) / 1e9, 3) == billions


def test_a_graph_is_timed_without_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA's graphs and events, whose clock advances with each call."""
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(calls)

        def elapsed_time(self, other: Event) -> float:
            return 7.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seconds = timing.seconds_of_graph(torch.device("cpu"), lambda: calls.append("run"))
    assert calls == ["run", *["replay"] * timing.REPEAT] and seconds == 0.007
