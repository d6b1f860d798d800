"""Measure the host's cost of a step (planning, bookkeeping, results) beside the model, and whether it grows.

    python benchmarks/steps.py [--cached 0,10000,100000] [--waiting 0,1000,10000] [--running 1,8,64]
    python benchmarks/steps.py --lookahead 1,4,16 [--rows 256]
    python benchmarks/steps.py --model [--batch 1,64] [--steps 48]

The first form runs core, scheduler and caches with a model that computes nothing, and measures this thread's CPU time,
which other work on the machine hardly affects. Every row of the table is one situation; `x` is its cost over
that of the same rows with nothing waiting and nothing cached (flat is about 1.0), `worst` the dearest single step
(garbage collection included), `gc` one full collection. Below it: steps while a pause drains, steps of `generate` with
that many prompts, steps with a long prompt at the head of the queue that finds no room, and single operations.
The second form prints the cost of a token where a step samples several of each row, with nothing and with 10,000
requests waiting. The third runs the default model on the CPU kernels and prints the share of a step's wall time outside
the calls in C. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NoReturn

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.build import EngineParts
from nano_inference.config import CacheType
from nano_inference.core.cache import KVManager, make_kv
from nano_inference.core.step import BlockCopy, Row, RowResult
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.types import StepResult

CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")
BLOCK, STEP_TOKENS, VOCAB_SIZE, MAX_LEN = 16, 2048, 50_000, 16384
FIRST, DRAWN = 1, 2
"""Every text begins with the same token, as the texts of a chat template do; every drawn token is the same."""
PROMPT_TOKENS, TEXT_BLOCKS = 32, 64
ROUND, ROUNDS, WARM_UP = 48, 9, 32
"""Steps that are timed together (three blocks a row), how often, and those before the first."""
SALT = (0, "")


class IdleRunner:
    """Computes nothing, and knows the CPU seconds that writing its answers took."""

    failure = None

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        """Draw the same token for every row."""
        started = time.thread_time()
        results = {
            row.id: RowResult(id=row.id, tokens=(DRAWN,) * row.num_sampled, logprobs=(-1.0,) * row.num_sampled)
            for row in rows
        }
        self.seconds += time.thread_time() - started
        return results

    def free_cache(self) -> None:
        """There is none."""

    def recover(self) -> None:
        pass

    def restore_cache(self) -> None:
        """There is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What an engine is in the middle of."""

    cache: CacheType
    running: int
    waiting: int = 0
    lookahead: int = 1
    cached: int = 0
    """Blocks that the prefix cache could give to new requests; every further block evicts one of them."""


class Stage:
    """Owns an engine in the middle of a scene."""

    def __init__(self, scene: Scene, *, begin: bool = True) -> None:
        self.rng = random.Random(7)
        self.runner = IdleRunner()
        num_steps = scene.lookahead * (WARM_UP + ROUND * ROUNDS + 8)
        blocks_of_row = -(-(PROMPT_TOKENS + num_steps) // BLOCK) + 2
        num_blocks = max(scene.cached, (scene.running + 1) * blocks_of_row + STEP_TOKENS // BLOCK)
        self.kv = make_kv(scene.cache, num_blocks, BLOCK)
        self.texts = list(fill(self.kv, scene.cached, self.rng))
        parts = EngineParts(
            runner=self.runner,
            kv=self.kv,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_LEN,
            lookahead=scene.lookahead,
        )
        config = EngineConfig(model_path="none", max_batch_size=scene.running, max_tokens_per_batch=STEP_TOKENS, seed=1)
        self.engine = InferenceEngine(config, parts=parts)
        if begin:
            self.add(scene.running, num_steps)
            while self.engine.tick().stats.num_waiting:
                pass
            self.waiting = self.add(scene.waiting, num_steps)

    def timed_tick(self) -> float:
        """Run a step; return its CPU microseconds without the runner's."""
        idle, started = self.runner.seconds, time.thread_time()
        self.engine.tick()
        return 1e6 * (time.thread_time() - started - (self.runner.seconds - idle))

    def add(self, count: int, new_tokens: int, size: int = PROMPT_TOKENS) -> list[int]:
        """Queue requests; return their ids."""
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=1)
        return [self.engine.add_request(text_of(self.rng, size), params) for _ in range(count)]


def text_of(rng: random.Random, size: int) -> list[int]:
    """Return a text that shares no more than its first token with any other."""
    return [FIRST, *(rng.randrange(3, VOCAB_SIZE) for _ in range(size - 1))]


def fill(kv: KVManager, num_blocks: int, rng: random.Random) -> Iterator[list[int]]:
    """Leave texts of 1024 tokens in the cache; yield them, oldest first."""
    for _ in range(num_blocks // TEXT_BLOCKS):
        text = text_of(rng, TEXT_BLOCKS * BLOCK)
        kv.release(kv.publish(text, SALT, kv.take(TEXT_BLOCKS), 0, len(text)))
        yield text


def time_rounds(stages: Sequence[Stage]) -> list[list[list[float]]]:
    """Return the CPU microseconds of each step of each round of each stage; the stages take turns, round by round."""
    for stage in stages:
        for _ in range(WARM_UP):
            stage.engine.tick()
    rounds: list[list[list[float]]] = [[] for _ in stages]
    for _ in range(ROUNDS):
        for stage, done in zip(stages, rounds, strict=True):
            done.append([stage.timed_tick() for _ in range(ROUND)])
    return rounds


def cost_of(rounds: list[list[float]]) -> float:
    """Return the median of the rounds' means."""
    return statistics.median(map(statistics.fmean, rounds))


def over(rounds: list[list[float]], others: list[list[float]]) -> float:
    """Return the median ratio of rounds that were run one after the other."""
    return statistics.median(sum(one) / sum(other) for one, other in zip(rounds, others, strict=True))


def us_of(call: Callable[[], object], times: int) -> float:
    """Return the median CPU microseconds of a call."""
    taken = []
    for _ in range(times):
        started = time.thread_time()
        call()
        taken.append(time.thread_time() - started)
    return 1e6 * statistics.median(taken)


def scenes(arguments: argparse.Namespace) -> Iterator[Scene]:
    """Yield the empty case first, then more waiting, then more cached, then most of both."""
    for cache in CACHE_TYPES:
        for running in arguments.running:
            pairs = [(waiting, 0) for waiting in arguments.waiting] + [(0, cached) for cached in arguments.cached]
            pairs.append((max(arguments.waiting), max(arguments.cached)))
            for waiting, cached in dict.fromkeys([(0, 0), *pairs]):
                yield Scene(cache=cache, running=running, waiting=waiting, cached=cached)


def time_scenes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table of steps; return its rows."""
    print(f"{'cache':7}{'running':>8}{'waiting':>9}{'cached':>9}{'us/step':>10}{'x':>7}{'worst us':>10}{'gc ms':>8}")
    rows: list[dict[str, Any]] = []
    for scene in scenes(arguments):
        row = asdict(scene) | time_scene(scene)
        print(
            f"{scene.cache:7}{scene.running:8}{scene.waiting:9}{scene.cached:9}{row['us']:10.1f}{row['ratio']:7.2f}"
            f"{row['worst_us']:10.0f}{row['gc_ms']:8.1f}",
            flush=True,
        )
        rows.append(row)
    return rows


def time_scene(scene: Scene) -> dict[str, float]:
    """Time a scene beside the same rows with nothing waiting and nothing cached."""
    gc.collect()
    empty, stage = Stage(Scene(cache=scene.cache, running=scene.running)), Stage(scene)
    base, rounds = time_rounds([empty, stage])
    return {
        "us": cost_of(rounds),
        "ratio": over(rounds, base),
        "worst_us": max(map(max, rounds)),
        "gc_ms": us_of(gc.collect, 1) / 1e3,
    }


def draining(waiting: int) -> Stage:
    """Return an engine whose pause waits for 8 rows to end, with so many requests waiting."""
    stage = Stage(Scene(cache="radix", running=8, waiting=waiting))
    stage.engine.pause("wait", blocking=False)
    return stage


def blocked(head_tokens: int) -> Stage:
    """Return an engine of 8 rows where a prompt of so many tokens heads the queue and finds too few blocks."""
    stage = Stage(Scene(cache="radix", running=9), begin=False)
    num_steps = WARM_UP + ROUND * ROUNDS + 8
    stage.add(8, num_steps)
    stage.engine.tick()
    growth = 8 * (-(-num_steps // BLOCK) + 1)
    stage.kv.take(stage.kv.num_free_blocks() - growth)
    if head_tokens:
        stage.add(1, 1, head_tokens)
    return stage


def time_lookahead(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the cost of a token for each lookahead, over the first one without waiting requests; return the rows."""
    found: list[dict[str, Any]] = []
    for waiting in (0, 10_000):
        stages = [
            Stage(Scene(cache="radix", running=arguments.rows, waiting=waiting, lookahead=count))
            for count in arguments.lookahead
        ]
        for count, rounds in zip(arguments.lookahead, time_rounds(stages), strict=True):
            us = cost_of(rounds) / (count * arguments.rows)
            found.append(
                {"lookahead": count, "waiting": waiting, "us": us, "ratio": us / (found or [{"us": us}])[0]["us"]}
            )
            print(
                f"{arguments.rows} rows, {waiting} waiting, {count} a step: {us:.2f} us a token "
                f"({found[-1]['ratio']:.2f}x)",
                flush=True,
            )
    return found


def time_growth(name: str, counts: Sequence[int], make: Callable[[int], Stage]) -> list[dict[str, Any]]:
    """Print what a step costs for rising numbers of one kind, over that of the first; return the rows."""
    rounds = time_rounds([make(count) for count in counts])
    return rows_of(name, counts, [cost_of(one) for one in rounds], [over(one, rounds[0]) for one in rounds])


def rows_of(name: str, counts: Sequence[int], costs: Sequence[float], ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Print a line and return its figures."""
    found = list(zip(counts, costs, ratios, strict=True))
    print(f"{name:46} " + ", ".join(f"{count}: {us:.1f} us ({x:.2f}x)" for count, us, x in found), flush=True)
    return [{"what": name, "count": count, "us": us, "ratio": x} for count, us, x in found]


def generate_cost(waiting: int) -> float:
    """Microseconds of a step of `generate` with that many prompts in addition to 8 running ones."""
    stage = Stage(Scene(cache="radix", running=8), begin=False)
    prompts = [text_of(stage.rng, PROMPT_TOKENS) for _ in range(waiting + 8)]
    stamps: list[float] = []

    def stamp(_: StepResult) -> None:
        stamps.append(time.thread_time() - stage.runner.seconds)
        if len(stamps) > WARM_UP + ROUND * ROUNDS:
            raise TimeoutError

    with suppress(TimeoutError):
        stage.engine.generate(prompts, SamplingParams(max_tokens=4096, ignore_eos=True, seed=1), progress=stamp)
    starts = stamps[WARM_UP::ROUND]
    return 1e6 * statistics.median((after - before) / ROUND for before, after in pairwise(starts))


def time_generate(waiting: Sequence[int]) -> list[dict[str, Any]]:
    """Print the cost of a step of `generate` with prompts in addition to 8 running ones; return the rows."""
    costs = [generate_cost(count) for count in waiting]
    return rows_of("8 rows of generate, further prompts", waiting, costs, [cost / costs[0] for cost in costs])


def time_queue(waiting: int) -> dict[str, float]:
    """Microseconds of adding a request behind so many, and of aborting the last and those in the middle."""
    stage = Stage(Scene(cache="radix", running=8, waiting=waiting))
    prompt, params = text_of(stage.rng, PROMPT_TOKENS), SamplingParams(max_tokens=8, seed=1)
    added: list[int] = []
    found = {"add": us_of(lambda: added.append(stage.engine.add_request(prompt, params)), 200)}
    found["abort last"] = us_of(lambda: stage.engine.abort(added.pop()), 200)
    middle = iter(stage.waiting[waiting // 2 :])
    if waiting:
        found["abort middle"] = us_of(lambda: stage.engine.abort(next(middle)), min(200, waiting // 2))
    return found


def time_peeks(cache: CacheType, cached: int) -> dict[str, float]:
    """Microseconds of asking for a text of 1024 tokens: found, only its first token known, nothing known."""
    stage = Stage(Scene(cache=cache, running=1, cached=cached))
    known = iter([[*text, 0] for text in reversed(stage.texts)] * 200)
    near = iter([text_of(stage.rng, TEXT_BLOCKS * BLOCK) for _ in range(200)])
    found = {"miss": us_of(lambda: stage.kv.peek(next(near), SALT), 200)}
    far = [0, *text_of(stage.rng, TEXT_BLOCKS * BLOCK)]
    found["unknown"] = us_of(lambda: stage.kv.peek(far, SALT), 200)
    if cached:
        assert len(stage.kv.peek(next(known), SALT).blocks) == TEXT_BLOCKS, "the newest text is still there"
        found["hit"] = us_of(lambda: stage.kv.peek(next(known), SALT), min(200, len(stage.texts) // 2))
    return found


def time_operations(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print what single operations cost; return the rows."""
    print("\nsingle operations, microseconds")
    rows: list[dict[str, Any]] = []
    for waiting in arguments.waiting:
        rows.append({"waiting": waiting} | time_queue(waiting))
    for cache in CACHE_TYPES:
        for cached in arguments.cached:
            rows.append({"cache": cache, "cached": cached} | time_peeks(cache, cached))
    for row in rows:
        print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return rows


class TimedCode:
    """Wraps the compiled code and sums the wall seconds spent in each of its functions."""

    def __init__(self, code: Any) -> None:
        self._code = code
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        function, seconds = getattr(self._code, name), self.seconds
        seconds[name] = 0.0

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds[name] += time.perf_counter() - started

        setattr(self, name, timed)
        return timed


def time_model(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the share of decode steps outside the calls in C, for each batch size; return the rows."""
    config = EngineConfig(
        model_path=arguments.model, device="cpu", dtype=arguments.dtype, num_threads=arguments.threads, seed=1
    )
    rows = []
    with InferenceEngine(config) as engine:
        executor = engine.parts.executor
        if not isinstance(executor, CpuExecutor):
            no_kernels()
        library: Any = executor.library
        library.code = code = TimedCode(library.code)
        for batch in arguments.batch:
            rows.append({"batch": batch} | time_batch(engine, code, batch, arguments.steps))
            engine.abort_all()
            print(", ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    return rows


def no_kernels() -> NoReturn:
    """Refuse: where torch computes there is no C to leave out."""
    raise SystemExit("--model: torch computes here; the share is of steps on the CPU kernels (doctor says why)")


def time_batch(engine: InferenceEngine, code: TimedCode, batch: int, num_steps: int) -> dict[str, float]:
    """Return a decode step's milliseconds, those in each function in C, and the share outside them."""
    rng = random.Random(batch)
    params = SamplingParams(temperature=1.0, max_tokens=num_steps + 16, ignore_eos=True, seed=1)
    for _ in range(batch):
        engine.add_request([rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)], params)
    while (stats := engine.tick().stats).num_waiting or stats.num_computed != stats.num_rows:
        pass
    engine.tick()
    code.seconds |= dict.fromkeys(code.seconds, 0.0)
    started = time.perf_counter()
    for _ in range(num_steps):
        engine.tick()
    total = time.perf_counter() - started
    host = total - sum(code.seconds.values())
    parts = {f"{name} ms": 1e3 * seconds / num_steps for name, seconds in code.seconds.items() if seconds}
    return (
        {"step ms": 1e3 * total / num_steps} | parts | {"host ms": 1e3 * host / num_steps, "host share": host / total}
    )


def counts(text: str) -> list[int]:
    """Read a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=counts, default=[1, 8, 64])
    parser.add_argument("--waiting", type=counts, default=[0, 1000, 10_000])
    parser.add_argument("--cached", type=counts, default=[0, 10_000, 100_000])
    parser.add_argument("--model", nargs="?", const="default", default="", help="a model to run instead of none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batch", type=counts, default=[1, 64])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--lookahead", type=counts, default=[], help="tokens of a row in a step")
    parser.add_argument("--rows", type=int, default=256, help="with --lookahead")
    arguments = parser.parse_args()
    if arguments.lookahead:
        print(json.dumps({"lookahead": time_lookahead(arguments)}))
        return
    if arguments.model:
        print(json.dumps({"model": time_model(arguments)}))
        return
    found: dict[str, Any] = {"steps": time_scenes(arguments)}
    print()
    found["growth"] = [
        *time_growth("8 rows, a pause waits for them, waiting", arguments.waiting, draining),
        *time_generate(arguments.waiting),
        *time_growth("8 rows, a prompt that finds no room, tokens", [0, 512, 4096], blocked),
    ]
    found["operations"] = time_operations(arguments)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
