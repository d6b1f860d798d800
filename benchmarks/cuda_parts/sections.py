"""The sections of benchmarks/cuda.py, the most important first, and its command line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.cuda_parts import engines, peers
from benchmarks.cuda_parts.kernels import kernels
from benchmarks.cuda_parts.models import SHAPES, Bench, open_random
from benchmarks.cuda_parts.nanochat import DEPTHS, nanochat
from benchmarks.cuda_parts.report import Report, Sink, Unit, run_unit
from benchmarks.cuda_parts.timing import seconds_of
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.executors.opening import CUDA_LOOKAHEAD

FIRST, *OTHERS = SHAPES
SECTIONS = ("ceilings", "engine", "kernels", "profile", "nanochat", "peers")
MOST_LISTED = 10


def ceilings(bench: Bench, sink: Sink) -> None:
    """Name the device; measure the copy and the product that everything else is compared with."""
    sink.add("device", "CPU" if bench.is_dry else torch.cuda.get_device_name())
    source = torch.zeros(bench.sized(1 << 30, 1 << 20), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    rate = 2 * source.numel() / seconds_of(bench, lambda: target.copy_(source), is_long=True)
    sink.add("copy", rate / 1e9, "GB/s")
    size = bench.sized(8192, 64)
    a, b = (torch.randn(size, size, device=bench.device).to(bench.dtype) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * size**3 / seconds_of(bench, lambda: torch.mm(a, b, out=out))
    name = f"product of {size} x {size}, {str(bench.dtype).removeprefix('torch.')}"
    sink.add(name, rate / 1e12, "TFLOP/s")
    one = torch.zeros(1, device=bench.device)
    sink.add("start of a graph with one small launch", 1e6 * seconds_of(bench, one.zero_), "µs")


def profile(bench: Bench, sink: Sink, name: str) -> None:
    """List the kernels of a decode step by time: of one window, divided by its steps."""
    num_rows = bench.sized(256, 4)
    with open_random(bench, name) as engine:
        _decode(bench, engine, num_rows)
        started = time.perf_counter()
        engine.tick()
        window = time.perf_counter() - started
        times, num_tokens = _profiled(bench, engine)
        engine.abort_all()
    total, num_steps = sum(times.values()), num_tokens / num_rows
    if not total:
        raise RuntimeError("the profiler saw no kernel")

    def add(kernel: str, seconds: float) -> None:
        sink.add(f"{kernel}, {name}", 1e6 * seconds / num_steps, "µs a step", share=seconds / total)

    sink.add(f"a step of {num_rows} rows without the profiler, {name}", 1e6 * window / num_steps, "µs a step")
    add("all kernels", total)
    for kernel in sorted(times, key=lambda one: -times[one])[:MOST_LISTED]:
        add(kernel[:46], times[kernel])
    ours = _own_kernels(bench)
    other = sum(value for kernel, value in times.items() if kernel not in ours and not _is_product(kernel))
    add("neither a Triton kernel of ours nor a product", other)


def _decode(bench: Bench, engine: InferenceEngine, num_rows: int) -> None:
    """Start requests with different prompts, and run steps until all of them decode in windows."""
    params = SamplingParams(max_tokens=8 * CUDA_LOOKAHEAD, temperature=0.6, ignore_eos=True, seed=1)
    for row in range(num_rows):
        engine.add_request([1 + row] * bench.sized(512, 8), params)
    while engine.tick().stats.num_waiting:
        pass
    for _ in range(2):
        engine.tick()


def _profiled(bench: Bench, engine: InferenceEngine) -> tuple[dict[str, float], int]:
    """Return the seconds of each kernel in a step of the engine, and the number of tokens that it sampled."""
    is_cuda = bench.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if is_cuda else activity.CPU]) as found:
        num_tokens = engine.tick().stats.num_sampled
        bench.wait()
    events = found.key_averages()
    times = {one.key: 1e-6 * (one.self_device_time_total if is_cuda else one.self_cpu_time_total) for one in events}
    return {name: seconds for name, seconds in times.items() if seconds}, num_tokens


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
    return any(part in name.lower() for part in ("gemm", "gemv", "cutlass", "cublas", "nvjet", "splitk"))


def units(is_dry: bool, home: Path | None) -> Iterator[Unit]:
    """Yield what to measure, the most important first."""
    yield Unit("ceilings", "", ceilings)
    yield Unit("engine", FIRST, partial(engines.model, name=FIRST, has_update=True))
    yield Unit("engine", f"deterministic {FIRST}", partial(engines.exact, name=FIRST))
    yield Unit("engine", f"groups of {FIRST}", partial(engines.groups, name=FIRST))
    for name in OTHERS:
        yield Unit("engine", name, partial(engines.model, name=name))
    for section, measure in (("kernels", kernels), ("profile", profile)):
        for name in [FIRST] if is_dry else SHAPES:
            yield Unit(section, name, partial(measure, name=name))
    for depth in DEPTHS:
        yield Unit("nanochat", f"d{depth}", partial(nanochat, depth=depth))
    for name in [FIRST] if is_dry else SHAPES:
        yield Unit("peers", f"Transformers, {name}", partial(peers.transformers_batching, name=name))
        for engine in peers.ENGINES if home else ():
            measure = partial(peers.engine_of, name=name, engine=engine, home=home)
            yield Unit("peers", f"{engine}, {name}", measure)
        if home:
            yield Unit("peers", f"flashinfer, {name}", partial(peers.flashinfer, name=name, home=home))


def run_sections(given: argparse.Namespace) -> int:
    """Run the sections that the options of benchmarks/cuda.py name; return 1 if something failed."""
    started = time.monotonic()
    names = given.only.split(",") if given.only else SECTIONS
    for name in names:
        if name not in SECTIONS:
            raise SystemExit(f"--only: there is no section {name}; there are {', '.join(SECTIONS)}")
    if given.model not in ("", *SHAPES):
        raise SystemExit(f"--model: there is no model {given.model}; there are {', '.join(SHAPES)}")
    if given.peers is not None and not given.peers.is_dir():
        raise SystemExit(f"--peers: {given.peers} is not a directory")
    report = Report(given.dry, given.out, {"torch": torch.__version__, "sections": list(names)})
    for unit in units(given.dry, given.peers):
        is_of_model = given.model in unit.name or not unit.name
        if unit.section in names and is_of_model:
            run_unit(unit, report, started + given.seconds)
    print(f"{time.monotonic() - started:.0f} s")
    return int(report.has_failed)
