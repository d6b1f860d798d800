"""Measure weight updates on each path: a blocking update against a plain copy, and steps beside one in flight.

    python benchmarks/weight_update.py [--rows 32] [--updates 5] [--threads N]

Both paths are measured, torch's (kernels=off) and the C kernels' (the default on a CPU): wall-clock and CPU time of a
blocking update, against one plain copy of as many bytes in the same run. Then a rollout of `--rows` sequences runs
while updates arrive without blocking; the time of each step is compared with the median step without one. The last
line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from harness import options, print_row

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.build import locate
from nano_inference.config import KernelsName
from nano_inference.executors.opening import load_model
from nano_inference.loading.checkpoint import open_checkpoint

PATHS: dict[str, KernelsName] = {"torch": "off", "C kernels": "auto"}
QUIET_STEPS = 20
"""Steps between the end of an update and the next one."""
MAX_STEPS = 900
Named = dict[str, torch.Tensor]


def cost_of(work: Callable[[], object], count: int) -> tuple[float, float, float]:
    """Return the medians of wall-clock and CPU milliseconds (all threads) of a call, and the first wall-clock time."""
    walls, cpus = [], []
    for _ in range(count):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
    return statistics.median(walls[1:]), statistics.median(cpus[1:]), walls[0]


def steps_around_updates(
    engine: InferenceEngine, named: Named, rows: int, count: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of steps while an update was in flight, and of the others, over one rollout."""
    params = SamplingParams(max_tokens=MAX_STEPS, ignore_eos=True, seed=1)
    for row in range(rows):
        engine.add_request([100 + row] * 16, params)
    engine.tick()
    busy: list[float] = []
    quiet: list[float] = []
    num_updates, num_quiet = 0, 0
    while num_updates < count or num_quiet < QUIET_STEPS:
        if num_quiet == QUIET_STEPS:
            engine.update_weights(named)
            num_updates, num_quiet = num_updates + 1, 0
        is_busy = engine.weight_info().update != "idle"
        started = time.perf_counter()
        engine.step()
        (busy if is_busy else quiet).append(1e3 * (time.perf_counter() - started))
        num_quiet += not is_busy
        if not engine.has_pending():
            raise RuntimeError(f"{count} updates took more than {MAX_STEPS} steps")
    engine.abort_all()
    return busy, quiet


def measure(engine: InferenceEngine, named: Named, rows: int, updates: int) -> dict[str, float]:
    """Measure one path: a copy by torch's threads, blocking updates, then updates in flight."""
    source = torch.cat([tensor.flatten() for tensor in named.values()])
    target = source.clone()
    copy, copy_cpu, _ = cost_of(lambda: target.copy_(source), updates + 1)
    blocking, cpu, first = cost_of(lambda: engine.update_weights(named, blocking=True), updates + 1)
    busy, quiet = steps_around_updates(engine, named, rows, updates)
    ordinary = statistics.median(quiet)
    return {
        "plain copy, ms": copy,
        "blocking update, ms": blocking,
        "over the copy": blocking / copy,
        "CPU time over the copy's": cpu / copy_cpu,
        "first update, ms": first,
        "ordinary step, ms": ordinary,
        "steps while gathered": len(busy) / updates,
        "median of them, steps": statistics.median(busy) / ordinary,
        "worst of them, steps": max(busy) / ordinary,
        "worst other, steps": max(quiet) / ordinary,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--updates", type=int, default=5)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    model = load_model(open_checkpoint(locate(given.model)), torch.device("cpu"), torch.float32, 1024)
    named = {name: slot.clone() for name, slot in model.weights.values()}
    num_bytes = sum(tensor.nbytes for tensor in named.values())
    print(f"weights {num_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    found = {}
    for path, kernels in PATHS.items():
        config = EngineConfig(given.model, device="cpu", num_threads=given.threads, kernels=kernels, dtype="float32")
        with InferenceEngine(config) as engine:
            found[path] = measure(engine, named, given.rows, given.updates)
    print_row(f"{given.rows} rows", *found)
    for name in found["torch"]:
        print_row(name, *(one[name] for one in found.values()))
    print(json.dumps({"bytes": num_bytes, **found}))


if __name__ == "__main__":
    main()
