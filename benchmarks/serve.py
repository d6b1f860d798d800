"""Measure the server's overhead: many streams over HTTP against the same work on an engine in this process.

    python benchmarks/serve.py [--streams 64] [--prompt 64] [--tokens 64] [--repeat 3]

Every round gives both sides the same prompts of token ids, with answers of full length; prefixes are not shared or
reused; both compute at most 256 tokens a step, as `serve` on a CPU. The rounds alternate. The client's work counts as
the server's, because it runs on the same cores. Legend: tok/s answer tokens a second
over the whole round; TTFT time to first token and ITL time between two tokens of one stream, milliseconds, over all
streams of all rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise

from nano_inference import EngineConfig, InferenceEngine, SamplingParams


@dataclass
class Measured:
    """What one side did."""

    rates: list[float] = field(default_factory=list)
    """Answer tokens a second, one for each round."""
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add_round(self, started: float, stamps: list[list[float]]) -> None:
        """Take the arrival times of every stream's tokens."""
        ended = max(times[-1] for times in stamps)
        self.rates.append(sum(map(len, stamps)) / (ended - started))
        self.first += [times[0] - started for times in stamps]
        self.gaps += [after - before for times in stamps for before, after in pairwise(times)]


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids: no two prompts share a prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def in_process(engine: InferenceEngine, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[float]]]:
    """Run a round on the engine itself; return when it began and when every token came."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, logprobs_mode="raw")
    started = time.perf_counter()
    place = {engine.add_request(prompt, params, claim=True): i for i, prompt in enumerate(prompts)}
    stamps: list[list[float]] = [[] for _ in prompts]
    while engine.has_pending():
        deltas = engine.tick().deltas
        now = time.perf_counter()
        for delta in deltas:
            stamps[place[delta.request_id]] += [now] * len(delta.token_ids)
    for request_id in place:
        engine.collect(request_id)
    return started, stamps


async def one_stream(port: int, prompt: list[int], num_tokens: int) -> list[float]:
    """Ask for one stream and return when its tokens came."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": 1, "stream": True}
        | {"return_token_ids": True}
    ).encode()
    headers = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", ""))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    stamps: list[float] = []
    while True:
        line = await reader.readline()
        if line.startswith(b"data: {") and b'"token_ids":[' in line.replace(b'"prompt_token_ids"', b""):
            stamps.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]") or not line:
            break
    writer.close()
    assert len(stamps) == num_tokens, f"{len(stamps)} tokens of {num_tokens}: {line!r}"
    return stamps


async def over_http(port: int, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[float]]]:
    """Run a round of concurrent streams."""
    started = time.perf_counter()
    stamps = await asyncio.gather(*(one_stream(port, prompt, num_tokens) for prompt in prompts))
    return started, stamps


def start_server(model: str, options: list[str]) -> tuple[subprocess.Popen[str], int, float]:
    """Start `serve`; return it, its port, and the seconds until it took requests."""
    started = time.perf_counter()
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "nano_inference",
        "serve",
        "--model",
        model,
        "--port",
        "0",
        "--no-log-requests",
    ]
    process = subprocess.Popen([*arguments, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        found = re.search(r"listening on http://127.0.0.1:(\d+)", line)
        port = int(found[1]) if found else port
        if line.startswith("ready:"):
            return process, port, time.perf_counter() - started
    raise SystemExit("the server did not start")


def report(sides: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """Print the table; return it as plain numbers."""
    rows: dict[str, dict[str, float]] = {}
    for name, one in sides.items():
        row = {"tokens_per_s": statistics.median(one.rates)}
        for what, values in (("ttft", one.first), ("itl", one.gaps)):
            row |= {f"{what}_p{share}_ms": 1e3 * percentile(values, share / 100) for share in (50, 95, 99)}
        rows[name] = row
    print(f"{'':<12}{'tok/s':>9}{'TTFT p50':>10}{'p95':>9}{'p99':>9}{'ITL p50':>10}{'p95':>9}{'p99':>9}")
    for name, row in rows.items():
        print(f"{name:<12}" + "".join(f"{value:>{10 if 'p50' in key else 9}.1f}" for key, value in row.items()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    process, port, ready_s = start_server(
        arguments.model, ["--num-threads", str(arguments.threads)] if arguments.threads else []
    )
    sides = {"in process": Measured(), "over HTTP": Measured()}
    try:
        with InferenceEngine(
            EngineConfig(
                model_path=arguments.model, device="cpu", num_threads=arguments.threads, max_tokens_per_batch=256
            )
        ) as engine:
            warm = make_prompts(2, 8, 999)
            in_process(engine, warm, 4)
            asyncio.run(over_http(port, warm, 4))
            for number in range(arguments.repeat):
                prompts = make_prompts(arguments.streams, arguments.prompt, number)
                sides["in process"].add_round(*in_process(engine, prompts, arguments.tokens))
                sides["over HTTP"].add_round(*asyncio.run(over_http(port, prompts, arguments.tokens)))
    finally:
        process.terminate()
        code = process.wait(60)
    rows = report(sides)
    overhead = rows["in process"]["tokens_per_s"] / rows["over HTTP"]["tokens_per_s"] - 1
    print(f"server overhead {overhead:.1%}; ready after {ready_s:.1f} s; exit code {code}")
    print(json.dumps({"rows": rows, "overhead": overhead, "ready_s": ready_s, "streams": arguments.streams}))


if __name__ == "__main__":
    main()
