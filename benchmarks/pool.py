"""Compare a pool of Ray actors with as many engine processes without Ray, and with one engine, on the same work.

    python benchmarks/pool.py [--model default] [--replicas 2] [--rounds 5]

Each engine process has one CPU thread; "one engine, all threads" has as many threads as there are replicas. Every round
has new prompts, so nothing is cached, and runs each contender once, in turn. The processes without Ray get equal parts
of the prompts and return only a count of tokens; the pool returns samples and checks that they are those of one engine.
Times are medians over the rounds. Ray is started with `worker_niceness` 0: by default it gives its processes the
priority 15, so that any other work on the machine slows them down. The last line is JSON. Needs the extra `ray`.
"""

from __future__ import annotations

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

from harness import alternate, options, print_row, random_ids

from nano_inference import EngineConfig, InferenceEngine, RayFleet, RolloutPool, SamplingParams

PROCESSES = multiprocessing.get_context("spawn")
Generate = Callable[[list[list[int]], SamplingParams, int], Any]


def serve(config: EngineConfig, work: Connection) -> None:
    """Run an engine in its own process: answer (prompts, parameters, samples) with the number of tokens."""
    with InferenceEngine(config) as engine:
        work.send(0)
        while (given := work.recv()) is not None:
            work.send(sum(len(sample.completion_tokens) for sample in engine.generate(*given)))


@contextmanager
def processes(config: EngineConfig, count: int) -> Iterator[Generate]:
    """Open engine processes; yield a function that divides the prompts among them."""
    ends = [PROCESSES.Pipe() for _ in range(count)]
    running = [PROCESSES.Process(target=serve, args=(config, theirs), daemon=True) for _, theirs in ends]
    for process in running:
        process.start()
    for ours, _ in ends:
        ours.recv()

    def run(prompts: list[list[int]], params: SamplingParams, num_samples: int) -> int:
        for index, (ours, _) in enumerate(ends):
            ours.send((prompts[index::count], params, num_samples))
        return sum(ours.recv() for ours, _ in ends)

    yield run
    for (ours, _), process in zip(ends, running, strict=True):
        ours.send(None)
        process.join()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each sample")
    given = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"  # a spawned Python would look for modules in the current directory first
    os.environ.setdefault("RAY_worker_niceness", "0")
    config = EngineConfig(model_path=given.model, device="cpu", num_threads=1, kv_cache_bytes=256 << 20)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        one = stack.enter_context(InferenceEngine(config))
        threaded = stack.enter_context(InferenceEngine(replace(config, num_threads=given.replicas)))
        pool = stack.enter_context(RolloutPool(RayFleet(config, given.replicas)))
        contenders: dict[str, Generate] = {
            "one engine": one.generate,
            "one engine, all threads": threaded.generate,
            "processes without Ray": stack.enter_context(processes(config, given.replicas)),
            "pool": pool.generate,
        }

        def seconds(name: str, number: int) -> float:
            rng = random.Random(number)
            prompts = [random_ids(rng, rng.randrange(16, 64)) for _ in range(given.prompts)]
            params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, seed=number)
            started = time.perf_counter()
            results[name] = contenders[name](prompts, params, given.samples)
            took = time.perf_counter() - started
            if name == "pool":
                mine, pools = ([one.completion_tokens for one in results[side]] for side in ("one engine", "pool"))
                assert mine == pools, "the pool's samples differ from one engine's"
            return took

        measures = {name: lambda number, name=name: seconds(name, number) for name in contenders}
        found = {name: statistics.median(times) for name, times in alternate(measures, given.rounds).items()}
    num_tokens = given.prompts * given.samples * given.tokens
    print_row("", "s", "tokens/s", "pool's speed x")
    for name, time_s in found.items():
        print_row(name, time_s, num_tokens / time_s, time_s / found["pool"])
    print(json.dumps({"replicas": given.replicas, "tokens": num_tokens, "seconds": found}))


if __name__ == "__main__":
    main()
