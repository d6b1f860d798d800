"""Measure weight updates on each path: a blocking update against a plain copy, and steps beside one in flight.

    python benchmarks/weight_update.py [--rows 32] [--updates 5] [--threads N]

Both paths are measured, torch's (kernels=off) and the C kernels' (the default on a CPU): wall-clock and CPU time of a
blocking update, against one plain copy of as many bytes in the same run. Then a rollout of `--rows` sequences runs
while updates arrive without blocking; the time of each step is compared with the median step without one. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.build import locate
from nano_inference.config import KernelsName
from nano_inference.executors.opening import load_model
from nano_inference.loading.checkpoint import open_checkpoint

PATHS: Mapping[str, KernelsName] = MappingProxyType({"torch": "off", "C kernels": "auto"})
QUIET_STEPS = 20
"""Steps between the end of an update and the next one."""
MAX_STEPS = 900
Named = dict[str, torch.Tensor]


class Cost(NamedTuple):
    """Seconds on the clock, and of CPU time, of all threads."""

    wall: float
    cpu: float


def cost_of(work: Callable[[], object]) -> Cost:
    """Measure one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def median(costs: list[Cost]) -> Cost:
    """Return the median of each."""
    return Cost(statistics.median(cost.wall for cost in costs), statistics.median(cost.cpu for cost in costs))


def copy_cost(named: Named, count: int) -> Cost:
    """Return the cost of a plain copy of all weights, memory to memory, by torch's threads."""
    source = torch.cat([tensor.flatten() for tensor in named.values()])
    target = source.clone()
    return median([cost_of(lambda: target.copy_(source)) for _ in range(count)])


def weights_of(name: str, threads: int | None) -> Named:
    """Return a model's weights in float32, by name."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(open_checkpoint(locate(name)), torch.device("cpu"), torch.float32, 1024)
    return {name: slot.clone() for name, slot in model.weight_values()}


def steps_around_updates(
    engine: InferenceEngine, named: Named, rows: int, count: int
) -> tuple[list[float], list[float]]:
    """Seconds of the steps while an update was under way, and of those while none was, over one rollout."""
    params = SamplingParams(max_tokens=MAX_STEPS, ignore_eos=True, seed=1)
    for row in range(rows):
        engine.add_request([100 + row] * 16, params)
    busy: list[float] = []
    quiet: list[float] = []
    engine.tick()
    num_updates, num_quiet = 0, 0
    while num_updates < count or num_quiet < QUIET_STEPS:
        if num_quiet == QUIET_STEPS:
            engine.update_weights(named)
            num_updates, num_quiet = num_updates + 1, 0
        is_busy = engine.weight_info().update != "idle"
        started = time.perf_counter()
        engine.step()
        (busy if is_busy else quiet).append(time.perf_counter() - started)
        num_quiet += not is_busy
        if not engine.has_pending():
            raise RuntimeError(f"{count} updates took more than {MAX_STEPS} steps")
    engine.abort_all()
    return busy, quiet


def measure(engine: InferenceEngine, named: Named, rows: int, updates: int) -> dict[str, Any]:
    """Measure one path: a copy, blocking updates, then updates in flight."""
    copy = copy_cost(named, updates)
    first, *later = [cost_of(lambda: engine.update_weights(named, blocking=True)) for _ in range(updates + 1)]
    busy, quiet = steps_around_updates(engine, named, rows, updates)
    ordinary, blocking = statistics.median(quiet), median(later)
    return {
        "copy_s": copy.wall,
        "copy_cpu_s": copy.cpu,
        "blocking_first_s": first.wall,
        "blocking_s": blocking.wall,
        "blocking_cpu_s": blocking.cpu,
        "blocking_over_copy": blocking.wall / copy.wall,
        "blocking_cpu_over_copy": blocking.cpu / copy.cpu,
        "step_s": ordinary,
        "steps_per_update": len(busy) / updates,
        "worst_step_in_flight": max(busy) / ordinary,
        "median_step_in_flight": statistics.median(busy) / ordinary,
        "worst_step_otherwise": max(quiet) / ordinary,
    }


def show(path: str, found: Mapping[str, Any], num_bytes: int, rows: int) -> None:
    """Print one path's figures."""
    copy, blocking = found["copy_s"], found["blocking_s"]
    print(f"\n{path}")
    print(f"  one plain copy of the weights     {copy * 1e3:8.1f} ms   {num_bytes / copy / 1e9:.1f} GB/s")
    print(f"    CPU time                        {found['copy_cpu_s'] * 1e3:8.1f} ms")
    print(f"  blocking update                   {blocking * 1e3:8.1f} ms   {found['blocking_over_copy']:.1f}x the copy")
    print(
        f"    CPU time                        {found['blocking_cpu_s'] * 1e3:8.1f} ms   "
        f"{found['blocking_cpu_over_copy']:.1f}x the copy's"
    )
    print(f"    the first (fresh memory)        {found['blocking_first_s'] * 1e3:8.1f} ms")
    print(f"  ordinary step of {rows:3d} rows          {found['step_s'] * 1e3:8.1f} ms")
    print(f"  steps while an update is gathered {found['steps_per_update']:8.1f}      each update")
    print(f"    median of them                  {found['median_step_in_flight']:8.2f} ordinary steps")
    print(f"    worst of them                   {found['worst_step_in_flight']:8.2f} ordinary steps")
    print(f"  worst step without an update      {found['worst_step_otherwise']:8.2f} ordinary steps")


def main() -> None:
    """Measure both paths and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    named = weights_of(arguments.model, arguments.threads)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    print(f"weights {num_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    result: dict[str, Any] = {"bytes": num_bytes}
    for path, kernels in PATHS.items():
        config = EngineConfig(
            model_path=arguments.model, device="cpu", num_threads=arguments.threads, kernels=kernels, dtype="float32"
        )
        with InferenceEngine(config) as engine:
            result[path] = measure(engine, named, arguments.rows, arguments.updates)
        show(path, result[path], num_bytes, arguments.rows)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
