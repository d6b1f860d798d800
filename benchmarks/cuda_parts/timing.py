"""Times of launches on the device, without the host's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.cuda_parts.models import Bench

FLUSH_BYTES = 256 << 20
"""More than the L2 cache, which is overwritten before each launch: a step's weights are never there."""


def seconds_of(bench: Bench, run: Callable[[], object], repeat: int = 20) -> float:
    """Return the median seconds of the launches of a call, which must be such that a CUDA graph can capture it.

    On a device: from events around the replay of a graph, so the host's time for launches is not included, but the
    start of a graph is (`ceilings` measures it). Elsewhere: by the host's clock.
    """
    run()  # compiles
    bench.wait()
    if bench.device.type == "cuda":
        return seconds_of_graph(bench.device, run, repeat)
    return statistics.median(_clocked(run) for _ in range(2))


def seconds_of_large(bench: Bench, run: Callable[[], object], repeat: int = 20) -> float:
    """Return the median seconds of a call whose work is so long that the host's time for its launch does not count.

    Without a graph: a graph's copy is slower than kernels read and write.
    """
    run()
    bench.wait()
    if bench.device.type != "cuda":
        return statistics.median(_clocked(run) for _ in range(2))
    events = [(_event(), _event()) for _ in range(repeat)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return 1e-3 * statistics.median(float(before.elapsed_time(after)) for before, after in events)


def _clocked(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def seconds_of_graph(device: torch.device, run: Callable[[], object], repeat: int) -> float:
    """Return the median seconds of a call's launches, replayed after the L2 cache was overwritten."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = [(_event(), _event()) for _ in range(repeat)]
    for before, after in events:
        flush.zero_()
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return 1e-3 * statistics.median(float(before.elapsed_time(after)) for before, after in events)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
