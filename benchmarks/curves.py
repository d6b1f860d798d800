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
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

from peers.machine import processor
from peers.pages import wait_for_pages

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.config import Dtype

KV_CACHE_BYTES = 1 << 30
SHORT_TEXT, SEATS, FEWEST_STEPS = 8, 8, 4
LOW_ID, HIGH_ID = 1000, 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement of a curve, tokens a second."""

    x: int
    median: float
    low: float
    """The tenth percentile of the steps."""
    high: float
    """The ninetieth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of one precision."""

    model: str
    dtype: Dtype
    threads: int | None
    steps: int
    seconds: float
    """After these a point takes no further step."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    waiting: tuple[int, ...]

    def engine(self, max_batch_size: int) -> InferenceEngine:
        """Return an engine with so many seats, its cache brought in whole."""
        config = EngineConfig(
            model_path=self.model,
            device="cpu",
            dtype=self.dtype,
            num_threads=self.threads,
            max_batch_size=max_batch_size,
            kv_cache_bytes=KV_CACHE_BYTES,
        )
        engine = InferenceEngine(config)
        wait_for_pages(engine)
        return engine


def text_of(rng: random.Random, size: int) -> list[int]:
    """Return ordinary tokens of the default model."""
    return [rng.randrange(LOW_ID, HIGH_ID) for _ in range(size)]


def decode(engine: InferenceEngine, plan: Plan, x: int, rows: int) -> Point:
    """Time decode steps of what is queued, once so many rows draw; then end everything."""
    while (stats := engine.tick().stats).num_running < rows or stats.num_sampled < rows:
        pass
    rates: list[float] = []
    started = time.perf_counter()
    while len(rates) < plan.steps and (len(rates) < FEWEST_STEPS or time.perf_counter() - started < plan.seconds):
        start = time.perf_counter()
        num_drawn = engine.tick().stats.num_sampled
        rates.append(num_drawn / (time.perf_counter() - start))
    engine.abort_all()
    ordered = sorted(rates)
    tenth = len(ordered) // 10
    return Point(x=x, median=statistics.median(ordered), low=ordered[tenth], high=ordered[-1 - tenth])


def queue(engine: InferenceEngine, plan: Plan, texts: list[list[int]]) -> None:
    """Ask for more tokens of each text than will be timed."""
    params = SamplingParams(max_tokens=plan.steps + 8, ignore_eos=True, seed=1)
    for text in texts:
        engine.add_request(text, params)


def against_batch(plan: Plan, tell: Callable[[Point], None]) -> None:
    """Measure more and more rows."""
    rng = random.Random(1)
    with plan.engine(max(plan.batches)) as engine:
        for rows in plan.batches:
            queue(engine, plan, [text_of(rng, SHORT_TEXT) for _ in range(rows)])
            tell(decode(engine, plan, rows, rows))


def against_context(plan: Plan, tell: Callable[[Point], None]) -> None:
    """Measure one row behind longer and longer texts."""
    with plan.engine(1) as engine:
        room = engine.limits.max_model_len - plan.steps - 8
        text = text_of(random.Random(2), min(room, max(plan.contexts)))
        for size in sorted({min(room, size) for size in plan.contexts}):
            queue(engine, plan, [text[:size]])
            tell(decode(engine, plan, size, 1))


def against_waiting(plan: Plan, tell: Callable[[Point], None]) -> None:
    """Measure 8 rows with more and more requests behind them."""
    rng = random.Random(3)
    with plan.engine(SEATS) as engine:
        for waiting in plan.waiting:
            queue(engine, plan, [text_of(rng, SHORT_TEXT) for _ in range(SEATS + waiting)])
            tell(decode(engine, plan, waiting, SEATS))


CURVES: tuple[tuple[str, str, Callable[[Plan, Callable[[Point], None]], None]], ...] = (
    ("batch", "rows in a step", against_batch),
    ("context", "tokens before the one that is drawn (one row)", against_context),
    ("waiting", "requests that wait (8 rows run)", against_waiting),
)
Curves = dict[str, list[Point]]


def measure(plan: Plan) -> Curves:
    """Measure and print all curves of one precision."""
    found: Curves = {name: [] for name, _, _ in CURVES}
    for name, _, run in CURVES:

        def tell(point: Point, name: str = name) -> None:
            found[name].append(point)
            spread = f"[{point.low:.1f}-{point.high:.1f}]"
            print(f"{plan.dtype:10} {name:8} {point.x:6} {point.median:9.1f} {spread:18} tok/s", flush=True)

        run(plan, tell)
    return found


def draw(curves: dict[str, Curves], path: Path) -> None:
    """Draw a panel for each curve, a line for each precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, panels = pyplot.subplots(1, len(CURVES), figsize=(5 * len(CURVES), 3.6))
    for panel, (name, label, _) in zip(panels, CURVES, strict=True):
        for dtype, found in curves.items():
            points = found[name]
            middle = [point.median for point in points]
            spread = [
                [point.median - point.low for point in points],
                [point.high - point.median for point in points],
            ]
            panel.errorbar([point.x for point in points], middle, yerr=spread, marker="o", capsize=3, label=dtype)
        panel.set_xscale("log", base=10 if name == "waiting" else 2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        panel.set_ylim(bottom=0)
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s")
    panels[0].legend(title="dtype")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse, measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto", help="comma-separated: a line in the chart for each")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--quick", action="store_true", help="few small points and steps: does it run?")
    parser.add_argument("--chart", type=Path, help="file for the chart, PNG")
    arguments = parser.parse_args()
    quick = arguments.quick
    curves = {}
    for dtype in arguments.dtype.split(","):
        if dtype not in get_args(Dtype):
            parser.error(f"--dtype takes {', '.join(get_args(Dtype))}, got {dtype!r}")
        plan = Plan(
            model=arguments.model,
            dtype=cast(Dtype, dtype),
            threads=arguments.threads,
            steps=4 if quick else arguments.steps,
            seconds=arguments.seconds,
            batches=(1, 2) if quick else tuple(1 << power for power in range(9)),
            contexts=(64, 128) if quick else tuple(1 << power for power in range(7, 14)),
            waiting=(1, 100) if quick else (1, 10, 100, 1000, 10_000),
        )
        curves[dtype] = measure(plan)
    if arguments.chart:
        draw(curves, arguments.chart)
    curves = {
        dtype: {name: [asdict(point) for point in points] for name, points in found.items()}
        for dtype, found in curves.items()
    }
    print(json.dumps({"processor": processor(), "threads": arguments.threads, "curves": curves}))


if __name__ == "__main__":
    main()
