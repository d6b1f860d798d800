"""Measure the server's overhead: many streams over HTTP against the same work on an engine in this process.

    python benchmarks/serve.py [--streams 64] [--prompt 64] [--tokens 64] [--rounds 3]

Every round gives both sides the same new prompts of token ids, with answers of full length; both compute at most 256
tokens a step, as `serve` on a CPU. The rounds alternate. The client's work counts as the server's, because it runs on
the same cores. Legend: tok/s answer tokens a second over the whole round, the median; TTFT time to first token and ITL
time between two tokens of one stream, milliseconds, over all streams of all rounds. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from itertools import pairwise

from harness import alternate, events, options, percentile, print_row, random_ids, serving

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

Stamps = list[list[float]]
"""When the tokens of each stream came."""


def in_process(engine: InferenceEngine, prompts: list[list[int]], num_tokens: int) -> Stamps:
    """Run a round on the engine itself."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, logprobs_mode="raw")
    place = {engine.add_request(prompt, params, claim=True): i for i, prompt in enumerate(prompts)}
    stamps: Stamps = [[] for _ in prompts]
    while engine.has_pending():
        deltas = engine.tick().deltas
        now = time.perf_counter()
        for delta in deltas:
            stamps[place[delta.request_id]] += [now] * len(delta.token_ids)
    for request_id in place:
        engine.collect(request_id)
    return stamps


async def one_stream(port: int, prompt: list[int], num_tokens: int) -> list[float]:
    """Ask for one stream and return when its tokens came."""
    fixed = {"ignore_eos": True, "seed": 1, "stream": True, "return_token_ids": True}
    asked = {"prompt": prompt, "max_tokens": num_tokens, **fixed}
    stamps = [
        time.perf_counter()
        async for event in events(port, "/v1/completions", asked)
        if any(choice.get("token_ids") for choice in event["choices"])
    ]
    assert len(stamps) == num_tokens, f"{len(stamps)} tokens of {num_tokens}"
    return stamps


async def over_http(port: int, prompts: list[list[int]], num_tokens: int) -> Stamps:
    """Run a round of concurrent streams."""
    return await asyncio.gather(*(one_stream(port, prompt, num_tokens) for prompt in prompts))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    config = EngineConfig(given.model, device="cpu", num_threads=given.threads, max_tokens_per_batch=256)
    words = ["--num-threads", str(given.threads)] if given.threads else []
    first: dict[str, list[float]] = {"in process": [], "over HTTP": []}
    gaps: dict[str, list[float]] = {"in process": [], "over HTTP": []}
    with serving(given.model, words) as (port, ready_s), InferenceEngine(config) as engine:

        def measure(side: str, number: int) -> float:
            """Return the tokens a second of a round; round 0 has little work."""
            rng, num_tokens = random.Random(number), given.tokens if number else 4
            prompts = [random_ids(rng, given.prompt) for _ in range(given.streams if number else 2)]
            started = time.perf_counter()
            if side == "in process":
                stamps = in_process(engine, prompts, num_tokens)
            else:
                stamps = asyncio.run(over_http(port, prompts, num_tokens))
            if number:
                first[side] += [times[0] - started for times in stamps]
                gaps[side] += [after - before for times in stamps for before, after in pairwise(times)]
            return len(prompts) * num_tokens / (max(times[-1] for times in stamps) - started)

        sides = {side: lambda number, side=side: measure(side, number) for side in first}
        rates = {side: statistics.median(found) for side, found in alternate(sides, given.rounds).items()}
    print_row("", "tok/s", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99")
    rows = {}
    for side, rate in rates.items():
        rows[side] = [rate] + [1e3 * percentile(one[side], p) for one in (first, gaps) for p in (0.5, 0.95, 0.99)]
        print_row(side, *rows[side])
    overhead = rates["in process"] / rates["over HTTP"] - 1
    print(f"server overhead {overhead:.1%}; ready after {ready_s:.1f} s")
    print(json.dumps({"rows": rows, "overhead": overhead, "ready_s": ready_s, "streams": given.streams}))


if __name__ == "__main__":
    main()
