"""Measure the host's cost of a step (planning, bookkeeping, results) beside the model, and whether it grows.

    python benchmarks/steps.py [--cached 0,10000,100000] [--waiting 0,1000,10000] [--running 1,8,64]
    python benchmarks/steps.py --lookahead 1,4,16 [--rows 256]
    python benchmarks/steps.py --compute [--model default] [--batch 1,64]

The first form runs core, scheduler and caches with a model that computes nothing, and measures this thread's CPU time,
which other work on the machine hardly affects. Every row of the table is one situation; `x` is its cost over that of
the same rows with nothing waiting and nothing cached (flat is about 1.0), `worst` the dearest single step (garbage
collection included). The second form prints the cost of a token where a step samples several of each row, with nothing
and with 10,000 requests waiting. The third runs a model on the CPU kernels and prints the share of a step's wall time
outside the calls in C. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from harness import numbers, options, print_row, random_ids

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.build import EngineParts
from nano_inference.config import CacheType
from nano_inference.core.cache import make_kv
from nano_inference.core.step import BlockCopy, Row, RowResult

CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")
BLOCK, STEP_TOKENS, VOCAB_SIZE, MAX_LEN = 16, 2048, 50_000, 16384
FIRST, DRAWN = 1, 2
"""Every text begins with the same token, as the texts of a chat template do; every drawn token is the same."""
PROMPT_TOKENS, TEXT_BLOCKS = 32, 64
ROUND, ROUNDS, WARM_UP = 48, 9, 32
"""Steps that are timed together (three blocks a row), how often, and those before the first."""
NUM_STEPS = WARM_UP + ROUND * ROUNDS + 8
SALT = (0, "")
Figures = dict[str, Any]


class IdleRunner:
    """Computes nothing, and counts the CPU seconds that writing its results takes."""

    failure = None

    def __init__(self) -> None:
        self.seconds = self.ended = 0.0

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        """Draw the same token for every row."""
        started = time.thread_time()
        results = {
            row.id: RowResult(id=row.id, tokens=(DRAWN,) * row.num_sampled, logprobs=(-1.0,) * row.num_sampled)
            for row in rows
        }
        self.ended = time.thread_time()
        self.seconds += self.ended - started
        return results

    def free_cache(self) -> None: ...

    def restore_cache(self) -> None: ...

    def recover(self) -> None: ...


class Stage:
    """Owns an engine with rows that run, requests that wait, and blocks that the prefix cache could give away."""

    def __init__(
        self,
        cache: CacheType,
        running: int,
        waiting: int = 0,
        cached: int = 0,
        lookahead: int = 1,
    ) -> None:
        self.rng, self.runner, self.running = random.Random(7), IdleRunner(), running
        self.commits = [0.0]
        """CPU microseconds of each step after the runner's."""
        num_new = lookahead * NUM_STEPS
        blocks_of_row = -(-(PROMPT_TOKENS + num_new) // BLOCK) + 2
        num_blocks = max(cached, (running + 1) * blocks_of_row + STEP_TOKENS // BLOCK)
        kv = make_kv(cache, num_blocks, BLOCK)
        for _ in range(cached // TEXT_BLOCKS):
            text = self.text(TEXT_BLOCKS * BLOCK)
            kv.release(kv.publish(text, SALT, kv.take(TEXT_BLOCKS), 0, len(text)))
        sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_LEN, "lookahead": lookahead}
        config = EngineConfig("none", max_batch_size=running, max_tokens_per_batch=STEP_TOKENS, seed=1)
        self.engine = InferenceEngine(config, parts=EngineParts(runner=self.runner, kv=kv, **sizes))
        self.add(running, num_new)
        while self.engine.tick().stats.num_waiting:
            pass
        self.add(waiting, num_new)

    def text(self, size: int) -> list[int]:
        """Return a text that shares no more than its first token with any other."""
        return [FIRST, *(self.rng.randrange(3, VOCAB_SIZE) for _ in range(size - 1))]

    def add(self, count: int, new_tokens: int) -> None:
        """Queue requests."""
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=1)
        for _ in range(count):
            self.engine.add_request(self.text(PROMPT_TOKENS), params)

    def timed_tick(self) -> float:
        """Run a step, whose deltas nobody reads; return its CPU microseconds without the runner's."""
        idle, started = self.runner.seconds, time.thread_time()
        self.engine.step()
        ended = time.thread_time()
        self.commits.append(1e6 * (ended - self.runner.ended))
        return 1e6 * (ended - started - (self.runner.seconds - idle))


def time_rounds(stages: Sequence[Stage]) -> list[Figures]:
    """Return the cost of a step of each stage (median of its rounds), the ratio to the first one's, the worst step.

    The stages take turns, round by round; a ratio is the median of those of rounds that ran one after the other.
    """
    for stage in stages:
        for _ in range(WARM_UP):
            stage.engine.tick()
    rounds: list[list[list[float]]] = [[] for _ in stages]
    for _ in range(ROUNDS):
        for stage, done in zip(stages, rounds, strict=True):
            done.append([stage.timed_tick() for _ in range(ROUND)])
    return [
        {
            "us": statistics.median(map(statistics.fmean, mine)),
            "ratio": statistics.median(sum(a) / sum(b) for a, b in zip(mine, rounds[0], strict=True)),
            "worst_us": max(map(max, mine)),
        }
        for mine in rounds
    ]


def time_scenes(given: argparse.Namespace) -> list[Figures]:
    """Print the table of steps: nothing waiting and cached first, then more of one, then most of both."""
    print_row("cache, running", "waiting", "cached", "us/step", "x", "worst us")
    found = []
    for cache in CACHE_TYPES:
        for running in given.running:
            pairs = [(0, 0), *((waiting, 0) for waiting in given.waiting), *((0, cached) for cached in given.cached)]
            for waiting, cached in dict.fromkeys([*pairs, (max(given.waiting), max(given.cached))]):
                gc.collect()
                _, row = time_rounds([Stage(cache, running), Stage(cache, running, waiting, cached)])
                print_row(f"{cache}, {running}", str(waiting), str(cached), row["us"], row["ratio"], row["worst_us"])
                found.append({"cache": cache, "running": running, "waiting": waiting, "cached": cached, **row})
    return found


def time_lookahead(given: argparse.Namespace) -> list[Figures]:
    """Print the cost of a token for each lookahead, over the first one without waiting requests."""
    found: list[Figures] = []
    for waiting in (0, 10_000):
        stages = [Stage("radix", given.rows, waiting, lookahead=count) for count in given.lookahead]
        for count, stage, row in zip(given.lookahead, stages, time_rounds(stages), strict=True):
            us, commit_us = (one / (count * given.rows) for one in (row["us"], statistics.median(stage.commits)))
            ratio = us / (found[0]["us"] if found else us)
            found.append({"lookahead": count, "waiting": waiting, "us": us, "commit_us": commit_us, "ratio": ratio})
            print(
                f"{given.rows} rows, {waiting} waiting, {count} a step: {us:.2f} us a token ({ratio:.2f}x), "
                f"{commit_us:.2f} of them after the model's step"
            )
    return found


class TimedCode:
    """Wraps the compiled code and sums the wall seconds spent in its functions."""

    def __init__(self, code: Any) -> None:
        self._code = code
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._code, name)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(self, name, timed)
        return timed


def time_model(given: argparse.Namespace) -> list[Figures]:
    """Print the milliseconds of decode steps, and the share outside the calls in C, for each batch size."""
    rows = []
    with InferenceEngine(EngineConfig(given.model, device="cpu", num_threads=given.threads, seed=1)) as engine:
        library: Any = getattr(engine.parts.executor, "library", None)
        if library is None:
            raise SystemExit("--compute: torch computes here; the share is of steps on the CPU kernels (see doctor)")
        library.code = code = TimedCode(library.code)
        for batch in given.batch:
            rng, params = random.Random(batch), SamplingParams(max_tokens=ROUND + 16, ignore_eos=True, seed=1)
            for _ in range(batch):
                engine.add_request(random_ids(rng, PROMPT_TOKENS), params)
            while (stats := engine.tick().stats).num_waiting or stats.num_computed != stats.num_rows:
                pass
            engine.tick()
            started, code.seconds = time.perf_counter(), 0.0
            for _ in range(ROUND):
                engine.tick()
            total = time.perf_counter() - started
            host = total - code.seconds
            times = {"step ms": 1e3 * total / ROUND, "host ms": 1e3 * host / ROUND, "host share": host / total}
            rows.append({"batch": batch, **times})
            engine.abort_all()
            print(", ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--running", type=numbers, default=[1, 8, 64])
    parser.add_argument("--waiting", type=numbers, default=[0, 1000, 10_000])
    parser.add_argument("--cached", type=numbers, default=[0, 10_000, 100_000])
    parser.add_argument("--lookahead", type=numbers, default=[], help="tokens of a row in a step")
    parser.add_argument("--rows", type=int, default=256, help="with --lookahead")
    parser.add_argument("--compute", action="store_true", help="run --model")
    parser.add_argument("--batch", type=numbers, default=[1, 64], help="with --compute")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    if given.lookahead:
        found["lookahead"] = time_lookahead(given)
    elif given.compute:
        found["model"] = time_model(given)
    else:
        found["steps"] = time_scenes(given)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
