"""`bench`: measure workloads on this engine, after one warm-up run each."""

from __future__ import annotations

import inspect
import json
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from nano_inference.cli.local import open_session
from nano_inference.cli.options import Common
from nano_inference.cli.terminal import bar, print_rows
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.types import BadRequest, SamplingParams

_LOW_ID, _HIGH_ID = 1000, 40_000  # range of ordinary token ids of the default model; its special tokens have lower ids
Measure = Callable[[InferenceEngine, int], tuple[str, float]]
"""Returns unit and value of one run; the repetition changes the prompts, so that no prefix is cached."""


def decode1(engine: InferenceEngine, repetition: int) -> tuple[str, float]:
    """One prompt of 32 tokens, 128 generated: batch 1, bound by memory bandwidth."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    times = [time.perf_counter() for _ in engine.stream(_ids(random.Random(1000 + repetition), 32), params)]
    return "decode tok/s", 127 / max(1e-9, times[-1] - times[0])


def prefill(engine: InferenceEngine, repetition: int) -> tuple[str, float]:
    """One prompt of 2048 tokens, 1 generated: bound by arithmetic."""
    prompt, start = _ids(random.Random(2000 + repetition), 2048), time.perf_counter()
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return "prefill tok/s", 2048 / (time.perf_counter() - start)


def rollout(engine: InferenceEngine, repetition: int) -> tuple[str, float]:
    """8 prompts of 64 tokens after 128 shared ones, 8 samples each, 128 generated at temperature 1."""
    rng = random.Random(3000 + repetition)
    system = _ids(rng, 128)
    prompts = [system + _ids(rng, 64) for _ in range(8)]
    start = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=128, ignore_eos=True, seed=repetition), 8)
    return "tok/s", 8 * 8 * 128 / (time.perf_counter() - start)


WORKLOADS: tuple[Measure, ...] = (decode1, prefill, rollout)


def run(names: Sequence[str], repeat: int, config: EngineConfig, common: Common) -> int:
    """Measure workloads and print a table; the last line of stdout is JSON."""
    if repeat < 1:
        raise BadRequest("--repeat", f"must be >= 1, got {repeat}")
    known = {one.__name__: one for one in WORKLOADS}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise BadRequest("--workload", f"must be one of {', '.join(known)}, got {unknown!r}")
    rows = []
    with open_session(config, common) as session, bar("measuring", quiet=common.quiet) as progress:
        for i, name in enumerate(names):
            progress(i, len(names))
            rows.append(measure_one(session.engine, name, known[name], repeat))
    shown = [
        (
            *(row["name"], row["unit"], f"{row['median']:.1f}", f"{row['min']:.1f}-{row['max']:.1f}"),
            " ".join((inspect.getdoc(known[row["name"]]) or "").split()),
        )
        for row in rows
    ]
    print_rows(("workload", "figure", "median", "min-max", "what it is"), shown)
    print(json.dumps({"workloads": rows}))
    return 0


def measure_one(engine: InferenceEngine, name: str, measure: Measure, repeat: int) -> dict[str, Any]:
    """Return the figures of `repeat` runs after a warm-up."""
    runs = [measure(engine, repetition) for repetition in range(repeat + 1)]
    values = [value for _, value in runs[1:]]
    return {
        "name": name,
        "unit": runs[0][0],
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "values": values,
    }


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_LOW_ID, _HIGH_ID) for _ in range(count)]
