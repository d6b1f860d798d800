"""Compare a pool of Ray actors with as many engine processes without Ray, and with one engine, on the same work.

    python benchmarks/pool.py [--model default] [--replicas 2] [--rounds 5]

Each engine process has one CPU thread; "one engine, all threads" has as many threads as there are replicas. Every round
has new prompts, so nothing is cached, and runs each contender once, in turn. The processes without Ray get equal parts
of the prompts and return only a count of tokens; the pool returns samples and checks that they are those of one engine.
Times are medians over the rounds. Ray is started with `worker_niceness` 0: by default it gives its processes the
priority 15, so that any other work on the machine slows them down. The last line is JSON. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from nano_inference import EngineConfig, InferenceEngine, RayFleet, RolloutPool, SamplingParams

PROCESSES = multiprocessing.get_context("spawn")
Prompts = list[list[int]]
Contender = Callable[[Prompts, SamplingParams, int], object]


def serve(config: EngineConfig, work: Connection) -> None:
    """Run an engine in its own process: answer (prompts, parameters, samples) with the number of tokens."""
    with InferenceEngine(config) as engine:
        work.send(0)
        while (given := work.recv()) is not None:
            work.send(sum(len(sample.completion_tokens) for sample in engine.generate(*given)))


@contextmanager
def processes(config: EngineConfig, count: int) -> Iterator[Contender]:
    """Open engine processes; yield a function that divides the prompts among them."""
    ends = [PROCESSES.Pipe() for _ in range(count)]
    running = [PROCESSES.Process(target=serve, args=(config, theirs), daemon=True) for _, theirs in ends]
    for one in running:
        one.start()
    ours = [mine for mine, _ in ends]
    for one in ours:
        one.recv()

    def run(prompts: Prompts, params: SamplingParams, num_samples: int) -> int:
        for index, one in enumerate(ours):
            one.send((prompts[index::count], params, num_samples))
        return sum(one.recv() for one in ours)

    yield run
    for one in ours:
        one.send(None)
    for process in running:
        process.join()


def work_of(round_number: int, args: argparse.Namespace) -> Prompts:
    """Return a round's prompts: random ids, and longer and shorter ones."""
    rng = random.Random(round_number)
    return [[rng.randrange(1000, 30_000) for _ in range(rng.randrange(16, 64))] for _ in range(args.prompts)]


def measure(contenders: dict[str, Contender], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return each contender's seconds of every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds + 1):
        prompts = work_of(number, args)
        params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=number)
        results: dict[str, Any] = {}
        for name, run in contenders.items():
            start = time.perf_counter()
            results[name] = run(prompts, params, args.samples)
            if number:  # round 0 warms up
                seconds[name].append(time.perf_counter() - start)
        tokens = [[sample.completion_tokens for sample in results[name]] for name in ("one engine", "pool")]
        assert tokens[0] == tokens[1], "the pool's samples differ from one engine's"
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="what EngineConfig.model_path takes")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each sample")
    args = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"  # a spawned Python would look for modules in the current directory first
    os.environ.setdefault("RAY_worker_niceness", "0")
    config = EngineConfig(model_path=args.model, device="cpu", num_threads=1, kv_cache_bytes=256 << 20)
    with ExitStack() as stack:
        one = stack.enter_context(InferenceEngine(config))
        threaded = stack.enter_context(InferenceEngine(replace(config, num_threads=args.replicas)))
        pool = stack.enter_context(RolloutPool(RayFleet(config, args.replicas)))
        contenders: dict[str, Contender] = {
            "one engine": one.generate,
            "one engine, all threads": threaded.generate,
            "processes without Ray": stack.enter_context(processes(config, args.replicas)),
            "pool": pool.generate,
        }
        seconds = {name: statistics.median(times) for name, times in measure(contenders, args).items()}
    num_tokens = args.prompts * args.samples * args.tokens
    for name, time_s in seconds.items():
        print(f"{name:25} {time_s:7.2f} s  {num_tokens / time_s:8.0f} tokens/s")
    ratios = {name: round(time_s / seconds["pool"], 3) for name, time_s in seconds.items() if name != "pool"}
    print("speed of the pool as a multiple of:")
    print(json.dumps({"replicas": args.replicas, "tokens": num_tokens, **ratios}))


if __name__ == "__main__":
    main()
