"""Times of launches on the device, without the host's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.cuda_parts.models import Bench

REPEAT = 20
FLUSH_BYTES = 256 << 20
"""More than the L2 cache, which is overwritten before each launch: a step's weights are never there."""


def seconds_of(bench: Bench, run: Callable[[], object], *, is_long: bool = False) -> float:
    """Return the median seconds of the launches of a call, which must be such that a CUDA graph can capture it.

    On a device: from events around the replay of a graph, so the host's time for launches is not included, but the
    start of a graph is (`ceilings` measures it). Elsewhere: by the host's clock. `is_long`: the host's time does not
    count, and there is no graph, whose copy is slower than kernels read and write.
    """
    run()  # compiles
    bench.wait()
    if bench.device.type != "cuda":
        return _clocked(run)
    return _between_events(run, lambda: None) if is_long else seconds_of_graph(bench.device, run)


def seconds_of_graph(device: torch.device, run: Callable[[], object]) -> float:
    """Return the median seconds of a call's launches, replayed after the L2 cache was overwritten."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return _between_events(graph.replay, flush.zero_)


def _between_events(run: Callable[[], object], before_each: Callable[[], object]) -> float:
    """Return the median seconds of a call on the device, by events before and after it."""
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(REPEAT)]
    for before, after in events:
        before_each()
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return 1e-3 * statistics.median(float(before.elapsed_time(after)) for before, after in events)


def _clocked(run: Callable[[], object]) -> float:
    """Return the median seconds of two calls by the host's clock."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
