"""What new weights cost: a blocking update against the machine's own copy, and the steps around one in flight.

    python benchmarks/weight_update.py [--rows 32] [--updates 5] [--threads N]

The default model runs a rollout of `--rows` sequences while updates come without blocking. Each step's time is compared
with the median step when nothing else goes on, in the same run; so is the blocking update with one plain copy of as
many bytes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.models.build import weight_slots

Named = dict[str, torch.Tensor]


def copy_seconds(named: Named) -> float:
    """The best of five plain copies of all weights, memory to memory."""
    source = torch.cat([tensor.flatten() for tensor in named.values()])
    target = source.clone()
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    return min(times)


def blocking_seconds(engine: InferenceEngine, named: Named, count: int) -> list[float]:
    """Seconds of each blocking update, none of them the first, which takes fresh memory."""
    times = []
    for _ in range(count + 1):
        begun = time.perf_counter()
        engine.update_weights(named, blocking=True)
        times.append(time.perf_counter() - begun)
    return times


def steps_around_updates(
    engine: InferenceEngine, named: Named, rows: int, count: int
) -> tuple[list[float], list[float]]:
    """Seconds of the steps while an update was under way, and of those while none was, over one rollout."""
    params = SamplingParams(max_tokens=40 * count + 10, ignore_eos=True, seed=1)
    for row in range(rows):
        engine.add_request([100 + row] * 16, params)
    busy: list[float] = []
    quiet: list[float] = []
    engine.tick()
    step = 0
    while engine.has_pending():
        step += 1
        if step % 40 == 20:
            engine.update_weights(named)
        is_busy = engine.weight_info().update != "idle"
        begun = time.perf_counter()
        engine.step()
        (busy if is_busy else quiet).append(time.perf_counter() - begun)
    return busy, quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    with InferenceEngine(
        EngineConfig(model_path=arguments.model, device="cpu", num_threads=arguments.threads)
    ) as engine:
        named = {name: slot.clone() for name, slot in weight_slots(engine.parts.runner.model).items()}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
        copy = copy_seconds(named)
        first, *later = blocking_seconds(engine, named, arguments.updates)
        busy, quiet = steps_around_updates(engine, named, arguments.rows, arguments.updates)
    ordinary = statistics.median(quiet)
    blocking = statistics.median(later)
    result = {
        "bytes": num_bytes,
        "copy_s": copy,
        "blocking_first_s": first,
        "blocking_s": blocking,
        "blocking_over_copy": blocking / copy,
        "step_s": ordinary,
        "steps_per_update": len(busy) / arguments.updates,
        "worst_step_in_flight": max(busy) / ordinary,
        "median_step_in_flight": statistics.median(busy) / ordinary,
        "worst_step_otherwise": max(quiet) / ordinary,
    }
    print(f"weights                             {num_bytes / 1e6:8.0f} MB")
    print(f"one plain copy of them              {copy * 1e3:8.1f} ms   {num_bytes / copy / 1e9:.1f} GB/s")
    print(f"blocking update                     {blocking * 1e3:8.1f} ms   {blocking / copy:.2f}x the copy")
    print(f"  the first (fresh memory)          {first * 1e3:8.1f} ms")
    print(f"ordinary step of {arguments.rows:3d} rows            {ordinary * 1e3:8.1f} ms")
    print(f"steps while an update is gathered   {len(busy) / arguments.updates:8.1f}      each update")
    print(f"  median of them                    {result['median_step_in_flight']:8.2f} ordinary steps")
    print(f"  worst of them                     {result['worst_step_in_flight']:8.2f} ordinary steps")
    print(f"worst step when nothing goes on     {result['worst_step_otherwise']:8.2f} ordinary steps")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
