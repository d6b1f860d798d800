"""`benchmarks/cuda.py`: a dry run measures every model, and no unit can end the others."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cuda_parts import device_tests, metadata, timing
from benchmarks.cuda_parts.device_tests import compare
from benchmarks.cuda_parts.engines import workload
from benchmarks.cuda_parts.kernels import compare_decode, flashinfer
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


def test_what_no_time_is_left_for_is_named(run: Run) -> None:
    done = run("--dry", "--seconds", "0", "--only", "ceilings,tests")
    assert done.stdout.count("skipped: no time is left") == 3 and done.returncode == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--only", "engines"), "--only: there is no section engines; there are ceilings, engine, kernels, profile,"),
        (("--model", "Qwen4"), "--model: there is no model Qwen4; there are Qwen2.5-0.5B,"),
    ],
)
def test_an_unknown_name_is_refused_in_one_line(run: Run, options: tuple[str, ...], error: str) -> None:
    done = run("--dry", *options)
    assert done.returncode == 1 and done.stderr.startswith(error) and done.stderr.count("\n") == 1


def test_one_model_is_measured_alone(run: Run) -> None:
    done = run("--dry", "--seconds", "0", "--only", "ceilings,engine,kernels,tests", "--model", "Qwen2.5-0.5B")
    names = [line.split(" · ")[0].split()[2] for line in done.stdout.splitlines() if line.startswith("dry ")]
    assert names == ["ceilings", "Qwen2.5-0.5B", "groups", "Qwen2.5-0.5B", "tests", "compute-sanitizer"]


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
        (hangs, 1.0, [1.0, "stopped: no time is left"], False),
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
def test_a_unit_that_hangs_leaves_time_for_the_others() -> None:
    report = Report(is_dry=True, out=None)
    run_unit(Unit("engine", "model", hangs), report, time.monotonic() + 60, 1.0)
    assert [one["value"] for one in report.figures] == [1.0, "stopped: 1 s are too long"]
    assert report.figures[1]["at"] < 10


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


@pytest.mark.parametrize(
    ("returncode", "stdout", "values"),
    [
        (0, "....\n4 passed in 1s\n", ["4 passed in 1s"]),
        (1, ".F\nFAILED a.py::b - c\n1 failed\n", ["failed: 1 failed", "FAILED a.py::b - c"]),
        (4, "", ["failed: no output"]),
    ],
)
def test_failures_of_the_gpu_tests_are_named(
    returncode: int, stdout: str, values: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], returncode, stdout, "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    pipe = Pipe()
    device_tests.tests(open_bench(is_dry=True), Sink("tests", pipe, {}, 0.0))  # type: ignore[arg-type]
    assert [one["value"] for one in pipe.found] == values * 2  # all tests, and those that need the GPU for themselves


def test_what_compute_sanitizer_reports_is_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The comparisons are divided among processes, each run once with each tool; the one that failed is shown."""
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    names = [f"tests/gpu/test_kernels.py::test_one[{index} of 8]" for index in range(8)]
    commands: list[list[str]] = []

    def done(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        if "--collect-only" in command:
            return subprocess.CompletedProcess([], 0, "\n".join([*names, "", "8 tests collected"]), "")
        commands.append(command)
        assert more["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        if names[4] not in command or "racecheck" in command:
            return subprocess.CompletedProcess([], 0, "3 passed\n========= ERROR SUMMARY: 0 errors\n", "")
        invalid = "========= Invalid __global__ read of size 4 bytes"
        return subprocess.CompletedProcess([], 9, f"{invalid}\n3 passed\n========= ERROR SUMMARY: 1 error\n", "")

    monkeypatch.setattr(subprocess, "run", done)
    pipe = Pipe()
    bench = dataclasses.replace(open_bench(is_dry=True), is_dry=False)
    device_tests.sanitize(bench, Sink("tests", pipe, {}, 0.0))  # type: ignore[arg-type]
    assert [(one["name"], one["value"]) for one in pipe.found] == [
        ("compute-sanitizer, memcheck", "2 of 3 processes, 6 tests passed: ========= ERROR SUMMARY: 0 errors"),
        ("compute-sanitizer, memcheck", "1 of 3 processes, 3 tests passed: failed: ========= ERROR SUMMARY: 1 error"),
        ("compute-sanitizer, memcheck", "========= Invalid __global__ read of size 4 bytes"),
        ("compute-sanitizer, memcheck", "========= ERROR SUMMARY: 1 error"),
        ("compute-sanitizer, racecheck", "3 of 3 processes, 9 tests passed: ========= ERROR SUMMARY: 0 errors"),
    ]
    assert {command[0] for command in commands} == {str(program)}
    assert sorted(part for command in commands for part in command if part in names) == sorted(names * 2)


def test_without_compute_sanitizer_or_a_gpu_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    dry, pipe = open_bench(is_dry=True), Pipe()
    for bench in (dry, dataclasses.replace(dry, is_dry=False)):
        device_tests.sanitize(bench, Sink("tests", pipe, {}, 0.0), toolkits=())  # type: ignore[arg-type]
    values = ["not run: it needs a GPU", "not run: compute-sanitizer is not installed"]
    assert [one["value"] for one in pipe.found] == values


def test_gpu_tests_that_take_too_long_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("pytest", 1.0, b"...F\n")

    monkeypatch.setattr(subprocess, "run", stop)
    pipe = Pipe()
    device_tests.tests(open_bench(is_dry=True), Sink("tests", pipe, {}, 0.0))  # type: ignore[arg-type]
    assert [one["value"] for one in pipe.found] == ["stopped after 1 s: ...F"] * 2


def test_a_checkout_that_is_not_installed_has_the_entry_points_of_the_package(tmp_path: Path) -> None:
    metadata.write_metadata(ROOT, tmp_path)
    (written,) = importlib.metadata.distributions(path=[str(tmp_path)])
    installed = importlib.metadata.distribution(written.name)
    found, expected = ({(p.group, p.name, p.value) for p in one.entry_points} for one in (written, installed))
    assert found == {point for point in expected if point[0] != "console_scripts"}


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
    seconds = timing.seconds_of_graph(torch.device("cpu"), lambda: calls.append("run"), 3)
    assert calls == ["run", "replay", "replay", "replay"] and seconds == 0.007


class Wrapper:
    """FlashInfer's wrapper of decode attention as far as the benchmark uses it, in float64."""

    factor = 1.0

    def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, starts: Tensor, pages: Tensor, filled: Tensor, *sizes: int, **dtypes: torch.dtype) -> None:
        """Keep where the keys of each row are."""
        assert set(dtypes) == {"q_data_type", "kv_data_type"} and starts[-1] == len(pages)
        num_heads, num_kv_heads, self.head_dim, page_size = sizes
        self.ratio = num_heads // num_kv_heads
        self.lengths = ((starts.diff() - 1) * page_size + filled).tolist()
        self.rows = pages.split(starts.diff().tolist())

    def run(self, q_RHD: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Write the attention output of each row."""
        for row, (places, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            k_KHD, v_KHD = (
                one[places.long()].flatten(0, 1)[:length].double().repeat_interleave(self.ratio, 1) for one in pages
            )
            score_HK = torch.einsum("hd,khd->hk", q_RHD[row].double(), k_KHD) * self.head_dim**-0.5
            out[row] = self.factor * torch.einsum("hk,khd->hd", score_HK.softmax(-1), v_KHD)


class WrongWrapper(Wrapper):
    """Scales its results."""

    factor = 1.1


def test_flashinfer_is_measured_beside_our_kernels() -> None:
    pipe = Pipe()
    sink = Sink("flashinfer", pipe, {"bytes": 1e9}, 0.0)  # type: ignore[arg-type]
    compare_decode(open_bench(is_dry=True), sink, MODELS[0], Wrapper)
    (figure,) = pipe.found
    assert figure["name"] == "decode attention of FlashInfer, Qwen2.5-0.5B" and figure["unit"] == "µs"
    assert all(figure[key] > 0 for key in ("value", "ours", "of copy"))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^its results differ by 0\.1 of the largest from ours$"):
        compare_decode(open_bench(is_dry=True), sink, MODELS[0], WrongWrapper)


@pytest.mark.parametrize(
    ("is_dry", "reason"), [(True, "it needs a GPU"), (False, "FlashInfer is not installed")], ids=["dry", "absent"]
)
def test_flashinfer_is_optional(is_dry: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pipe = Pipe()
    bench = dataclasses.replace(open_bench(is_dry=True), is_dry=is_dry)
    flashinfer(bench, Sink("flashinfer", pipe, {}, 0.0), MODELS[0])  # type: ignore[arg-type]
    assert [one["value"] for one in pipe.found] == [f"not run: {reason}"]
