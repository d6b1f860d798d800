"""Measure decoded tokens per second against rows in a step, context, and waiting requests.

    python benchmarks/curves.py [--dtype auto,int8] [--chart curves.png]
    python benchmarks/curves.py --quick

`batch`: number of rows with short texts. `context`: one row after a text of that many tokens; each text starts with the
previous one, so every token is computed once. `waiting`: 8 rows run, that many requests wait for a seat. A figure is
the median over decode steps, with the tenth and the ninetieth percentile; a point takes --steps steps, or fewer if they
exceed --seconds. The last line is JSON; the chart needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from harness import options, percentile, processor, random_ids, wait_for_pages

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

SEATS, SHORT_TEXT, FEWEST_STEPS = 8, 8, 4
LABELS = {
    "batch": "rows in a step",
    "context": "tokens before the one that is drawn (one row)",
    "waiting": f"requests that wait ({SEATS} rows run)",
}
Point = tuple[float, float, float]
"""Tokens a second of a step: median, tenth and ninetieth percentile."""


def decode(engine: InferenceEngine, texts: list[list[int]], rows: int, given: argparse.Namespace) -> Point:
    """Time decode steps of so many rows once all of them draw; then end everything."""
    params = SamplingParams(max_tokens=given.steps + 8, ignore_eos=True, seed=1)
    for text in texts:
        engine.add_request(text, params)
    while (stats := engine.tick().stats).num_running < rows or stats.num_sampled < rows:
        pass
    rates: list[float] = []
    started = time.perf_counter()
    while len(rates) < given.steps and (len(rates) < FEWEST_STEPS or time.perf_counter() - started < given.seconds):
        start = time.perf_counter()
        num_drawn = engine.tick().stats.num_sampled
        rates.append(num_drawn / (time.perf_counter() - start))
    engine.abort_all()
    return percentile(rates, 0.5), percentile(rates, 0.1), percentile(rates, 0.9)


def measure(dtype: str, given: argparse.Namespace) -> dict[str, dict[int, Point]]:
    """Measure and print all curves of one precision."""
    points = {
        "batch": [1, 2] if given.quick else [1 << power for power in range(9)],
        "context": [64, 128] if given.quick else [1 << power for power in range(7, 14)],
        "waiting": [1, 100] if given.quick else [1, 10, 100, 1000, 10_000],
    }
    seats = {"batch": max(points["batch"]), "context": 1, "waiting": SEATS}
    rng, found = random.Random(1), {name: dict[int, Point]() for name in points}
    for name, xs in points.items():
        changes = {"device": "cpu", "dtype": dtype, "num_threads": given.threads, "kv_cache_bytes": 1 << 30}
        config = EngineConfig.from_dict({"model_path": given.model, "max_batch_size": seats[name], **changes})
        with InferenceEngine(config) as engine:
            wait_for_pages(engine)
            room = engine.limits.max_model_len - given.steps - 8
            whole = random_ids(rng, min(room, max(xs)))
            for x in sorted({min(x, room) if name == "context" else x for x in xs}):
                count = {"batch": x, "context": 1, "waiting": SEATS + x}[name]
                texts = [whole[:x]] if name == "context" else [random_ids(rng, SHORT_TEXT) for _ in range(count)]
                rows = {"batch": x, "context": 1, "waiting": SEATS}[name]
                found[name][x] = decode(engine, texts, rows, given)
                median, low, high = found[name][x]
                print(f"{dtype:10} {name:8} {x:6} {median:9.1f} [{low:.1f}-{high:.1f}] tok/s", flush=True)
    return found


def draw(curves: dict[str, dict[str, dict[int, Point]]], path: Path) -> None:
    """Draw a panel for each curve, a line for each precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LABELS), figsize=(5 * len(LABELS), 3.6))
    for panel, (name, label) in zip(panels, LABELS.items(), strict=True):
        for dtype, found in curves.items():
            xs, (middle, low, high) = list(found[name]), zip(*found[name].values(), strict=True)
            ends = [
                [m - a for m, a in zip(middle, low, strict=True)],
                [b - m for m, b in zip(middle, high, strict=True)],
            ]
            panel.errorbar(xs, middle, yerr=ends, marker="o", capsize=3, label=dtype)
        panel.set_xscale("log", base=10 if name == "waiting" else 2)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
        panel.set_ylim(bottom=0)
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s")
    panels[0].legend(title="dtype")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dtype", default="auto", help="comma-separated: a line in the chart for each")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--quick", action="store_true", help="few small points: does it run?")
    parser.add_argument("--chart", type=Path, help="file for the chart, PNG")
    given = parser.parse_args()
    curves = {dtype: measure(dtype, given) for dtype in given.dtype.split(",")}
    if given.chart:
        draw(curves, given.chart)
    print(json.dumps({"processor": processor(), "threads": given.threads, "curves": curves}))


if __name__ == "__main__":
    main()
