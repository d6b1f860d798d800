"""The sections of benchmarks/cuda.py, and its report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_parts.kernels import launches, seconds_of
from benchmarks.cuda_parts.models import SHAPES, Bench, executor_of, open_random, random_weight
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.executors.cuda.launchers import plain_kernels, triton_kernels
from nano_inference.loader.sources import TensorSource

ROOT = Path(__file__).parents[2]
FIRST = "Qwen2.5-0.5B"
BARS = {
    ("bench.py", "Qwen2.5-0.5B"): 80_000.0,
    ("bench.py", "Qwen3-0.6B"): 22_000.0,
    ("bench.py", "Llama-3.2-1B"): 40_000.0,
    ("bench.py", "Qwen2.5-7B"): 10_000.0,
    ("one request", "Qwen2.5-0.5B"): 1_700.0,
    ("one request", "Qwen3-0.6B"): 1_400.0,
    ("one request", "Llama-3.2-1B"): 1_100.0,
    ("one request", "Qwen2.5-7B"): 235.0,
}
"""Tokens a second on one H200."""


@dataclass
class Report:
    """What was measured so far; prints each figure and keeps the JSON file complete."""

    bench: Bench
    out: Path | None
    figures: list[dict[str, Any]] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)

    def add(self, section: str, name: str, value: float | str, unit: str = "", **more: float | str) -> None:
        """Print a figure and write the file."""
        self.figures.append({"section": section, "name": name, "value": value, "unit": unit, **more})
        shown = f"{value:,.4g}" if isinstance(value, float) else value
        extra = "".join(f" · {key} {one:,.4g}" if isinstance(one, float) else f" · {one}" for key, one in more.items())
        print(f"{'dry ' * self.bench.is_dry}{section:9} {name:44} {shown} {unit}{extra}", flush=True)
        if self.out is not None:
            known = {"device": _device_name(self.bench), "torch": torch.__version__, "is_dry": self.bench.is_dry}
            self.out.write_text(json.dumps({**known, "figures": self.figures}, indent=1))


def _device_name(bench: Bench) -> str:
    return torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU"


def ceilings(bench: Bench, report: Report) -> None:
    """Measure the copy and the product that everything else is compared with."""
    source = torch.zeros(bench.sized(1 << 30, 1 << 20), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    rate = 2 * source.numel() / seconds_of(bench, copy)
    report.ceilings["bytes"] = rate
    report.add("ceilings", "copy", rate / 1e9, "GB/s")
    size = bench.sized(8192, 64)
    a, b = (torch.randn(size, size, device=bench.device).to(bench.dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    flops = 2 * size**3 / seconds_of(bench, multiply)
    report.ceilings["flops"] = flops
    report.add("ceilings", f"product of {size} x {size}, {bench.dtype}", flops / 1e12, "TFLOP/s")


def engine(bench: Bench, report: Report) -> None:
    """Measure whole engines."""
    for name in [FIRST, *(one for one in SHAPES if one != FIRST)]:
        with open_random(bench, name) as opened:
            _bench_py(bench, report, name, opened)
            _one_request(bench, report, name, opened)
            if name == FIRST:
                _update(bench, report, name, opened)
        if name == FIRST:
            _groups(bench, report, name)


def _bench_py(bench: Bench, report: Report, name: str, opened: InferenceEngine) -> None:
    rng, vocab = random.Random(0), bench.shape(name).vocab_size
    low, high = bench.sized(100, 4), bench.sized(1024, 12)
    count = bench.sized(256, 6)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]
    params = [
        SamplingParams(max_tokens=rng.randint(low, high), temperature=0.6, ignore_eos=True, seed=i)
        for i in range(count)
    ]
    opened.generate(prompts[:2], [SamplingParams(max_tokens=2, ignore_eos=True)] * 2)
    started = time.perf_counter()
    samples = opened.generate(prompts, params)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(sample.completion_tokens) for sample in samples)
    report.add("engine", f"bench.py, {name}", num_tokens / seconds, "tokens/s", **_bar("bench.py", name))


def _bar(kind: str, name: str) -> dict[str, float]:
    return {"bar": BARS[kind, name]}


def _one_request(bench: Bench, report: Report, name: str, opened: InferenceEngine) -> None:
    """Measure decoding alone: the time of many tokens less that of one."""
    prompt, size = [1] * bench.sized(128, 8), bench.sized(512, 8)

    def seconds(num_tokens: int) -> float:
        opened.flush_cache()
        started = time.perf_counter()
        opened.generate([prompt], SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
        return time.perf_counter() - started

    seconds(size)
    rate = (size - 1) / max(1e-9, seconds(size) - seconds(1))
    more = _bar("one request", name)
    if "bytes" in report.ceilings:
        more["roofline"] = report.ceilings["bytes"] / executor_of(opened).weight_bytes
    report.add("engine", f"one request, {name}", rate, "tokens/s", **more)


def _update(bench: Bench, report: Report, name: str, opened: InferenceEngine) -> None:
    """Measure the pause of an update: copying staged weights over those in use."""
    executor = executor_of(opened)
    staged = executor.stage()
    for spec in executor.program.weights:
        staged.put(spec, TensorSource(random_weight(spec, bench.device, bench.dtype)))
    new = staged.finish()
    bench.wait()
    started = time.perf_counter()
    executor.commit(new)
    bench.wait()
    seconds = time.perf_counter() - started
    rate = executor.weight_bytes / seconds / 1e9
    report.add("engine", f"pause of an update, {name}", 1e3 * seconds, "ms", gigabytes_a_second=rate)


def _groups(bench: Bench, report: Report, name: str) -> None:
    """Measure samples of shared prompts with and without reading their keys once."""
    rng, vocab = random.Random(1), bench.shape(name).vocab_size
    count, length, size = bench.sized(16, 2), bench.sized(1024, 300), bench.sized(512, 4)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
    params = SamplingParams(max_tokens=size, temperature=1.0, ignore_eos=True, seed=1)
    rates = []
    for is_shared in (True, False):
        with open_random(bench, name, reads_prefixes_once=is_shared) as opened:
            opened.generate(prompts, params, bench.sized(16, 3))
            started = time.perf_counter()
            samples = opened.generate(prompts, params, bench.sized(16, 3))
            seconds = time.perf_counter() - started
        rates.append(sum(len(sample.completion_tokens) for sample in samples) / seconds)
    report.add("engine", f"16 samples a prompt, {name}", rates[0], "tokens/s", ratio=rates[0] / rates[1], bar=1.5)


def kernels(bench: Bench, report: Report) -> None:
    """Measure single launches."""
    for name in [FIRST] if bench.is_dry else SHAPES:
        for launch in launches(bench, bench.shape(name)):
            seconds = seconds_of(bench, launch.run)
            more: dict[str, float] = {}
            if launch.num_bytes and "bytes" in report.ceilings:
                more["share of the copy"] = launch.num_bytes / seconds / report.ceilings["bytes"]
            if launch.flops and "flops" in report.ceilings:
                more["share of the product"] = launch.flops / seconds / report.ceilings["flops"]
            report.add("kernels", f"{launch.name}, {name}", 1e6 * seconds, "µs", **more)


def profile(bench: Bench, report: Report) -> None:
    """List the kernels of decode steps by time."""
    activity = torch.profiler.ProfilerActivity
    is_cuda = bench.device.type == "cuda"
    with open_random(bench, FIRST) as opened:
        prompts = [[1] * bench.sized(512, 8)] * bench.sized(256, 4)
        params = SamplingParams(max_tokens=bench.sized(64, 4), temperature=0.6, ignore_eos=True, seed=1)
        opened.generate(prompts, params)
        with torch.profiler.profile(activities=[activity.CUDA if is_cuda else activity.CPU]) as found:
            opened.generate(prompts, params)
    times: dict[str, float] = {}
    for event in found.key_averages():
        times[event.key] = event.self_device_time_total if is_cuda else event.self_cpu_time_total
    total = sum(times.values()) or 1.0
    for name in sorted(times, key=lambda one: -times[one])[:10]:
        report.add("profile", name[:44], 100 * times[name] / total, "%")
    ours = _own_kernels(bench)
    other = sum(value for name, value in times.items() if name not in ours and not _is_product(name))
    report.add("profile", "neither a Triton kernel of ours nor a product", 100 * other / total, "%")


def _own_kernels(bench: Bench) -> frozenset[str]:
    """Return the names of our Triton kernels; none in a dry run, which needs no Triton."""
    if bench.is_dry:
        return frozenset()
    from nano_inference.executors.cuda.kernels import advance, attention, linear, pointwise, sampler, select

    return frozenset(
        name for module in (advance, attention, linear, pointwise, sampler, select) for name in vars(module)
    )


def _is_product(name: str) -> bool:
    """Return whether a kernel's name is that of a matrix product of cuBLAS."""
    return any(part in name.lower() for part in ("gemm", "cutlass", "cublas", "nvjet", "splitk"))


def tests(bench: Bench, report: Report) -> None:
    """Run tests/gpu."""
    if importlib.util.find_spec("pytest") is None:
        report.add("tests", "tests/gpu", "not run: pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report.add("tests", "tests/gpu", (done.stdout.strip().splitlines() or ["no output"])[-1])


SECTIONS: dict[str, Callable[[Bench, Report], None]] = {
    "ceilings": ceilings, "engine": engine, "kernels": kernels, "profile": profile, "tests": tests,
}  # fmt: skip


def wanted(only: str) -> Iterator[str]:
    """Yield the sections to run. Raises `SystemExit` naming an unknown one."""
    names = only.split(",") if only else list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise SystemExit(f"--only: there is no section {name}; there are {', '.join(SECTIONS)}")
        yield name


def main(description: str) -> int:
    """Run the sections that the command line names; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=570.0)
    given = parser.parse_args()
    names = list(wanted(given.only))
    if not given.dry and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --dry runs on a CPU")
    device = torch.device("cpu" if given.dry else "cuda")
    found = plain_kernels() if given.dry else triton_kernels()
    dtype = torch.float32 if given.dry else torch.bfloat16
    bench = Bench(device=device, kernels=found, dtype=dtype, is_dry=given.dry)
    report = Report(bench, given.out)
    started, has_failed = time.monotonic(), False
    for name in names:
        if time.monotonic() - started > given.seconds:
            report.add(name, "skipped", f"more than {given.seconds:g} s have passed")
            continue
        try:
            SECTIONS[name](bench, report)
        except Exception as error:  # the other sections still tell something
            has_failed = True
            report.add(name, "failed", f"{type(error).__name__}: {error}".splitlines()[0])
    print(json.dumps({"ceilings": report.ceilings, "figures": report.figures}))
    return int(has_failed)
