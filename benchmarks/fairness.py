"""Measure time to first token and gaps between tokens while another request's long prompt is computed.

    python benchmarks/fairness.py [--budget 256] [--scenarios long,medium,mixed] [--repeat 1] [--threads N]

`long`: requests of 3 tokens that arrive while one prompt of 6,903 tokens is computed. `medium`: the same beside 1,921
tokens. `mixed`: random prompts (most of 3 to 60 tokens, some of 200 to 600, few of 1,500 to 2,500), each with 4 to 24
new tokens. A request arrives when the engine has computed a given number of tokens, possibly in the middle of a step,
so a slower machine or another scheduler gets the same load.

Legend: tok/s computed tokens a second; per CPU s the same over the CPU time of all threads; TTFT time to first token
and gap time between two tokens of one request, in milliseconds; `work` the tokens that the engine computed between a
request's arrival and its first token, which does not depend on the machine. `short` rows are those of prompts of at
most 60 tokens, `other` rows the rest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

SHORT_TOKENS = 60
SCENARIOS = ("long", "medium", "mixed")


@dataclass(kw_only=True)
class Asked:
    """One request and when its tokens came."""

    at: int
    """Tokens that the engine has computed when it arrives."""
    num_prompt: int
    num_new: int
    arrived: float = 0.0
    times: list[float] = field(default_factory=list)
    work: int = 0


@dataclass
class Measured:
    """The requests of all repetitions of a scenario."""

    asked: list[Asked] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def beside(num_prompt: int, rng: random.Random, count: int) -> list[Asked]:
    """Return a long prompt and short requests that arrive while it is computed."""
    places = sorted(rng.randrange(1, num_prompt) for _ in range(count))
    return [Asked(at=0, num_prompt=num_prompt, num_new=2), *(Asked(at=at, num_prompt=3, num_new=8) for at in places)]


def mixed(rng: random.Random, count: int) -> list[Asked]:
    """Return requests of random sizes; as many tokens are asked for as the engine computes, on average."""
    asked: list[Asked] = []
    at = 0.0
    for _ in range(count):
        kind = rng.random()
        low, high = (3, SHORT_TOKENS) if kind < 0.75 else (200, 600) if kind < 0.94 else (1500, 2500)
        one = Asked(at=int(at), num_prompt=rng.randint(low, high), num_new=rng.randint(4, 24))
        asked.append(one)
        at += rng.expovariate(1 / 250)
    return asked


def make(name: str, repetition: int) -> list[Asked]:
    """Return the requests of a scenario, in order of arrival; sizes and places depend on the repetition."""
    rng = random.Random(f"{name} {repetition}")
    if name == "mixed":
        return mixed(rng, 48)
    return beside(6903 if name == "long" else 1921, rng, 12)


def run(engine: InferenceEngine, asked: Sequence[Asked], rng: random.Random) -> Measured:
    """Serve the requests."""
    num_computed, due = 0, list(asked)
    by_id: dict[int, Asked] = {}
    started, cpu_started = time.perf_counter(), time.process_time()
    before, num_before = started, 0
    while due or engine.has_pending():
        while due and (due[0].at <= num_computed or not engine.has_pending()):
            one = due.pop(0)
            share = (one.at - num_before) / max(1, num_computed - num_before)
            one.arrived = before + min(1.0, max(0.0, share)) * (time.perf_counter() - before)
            one.work = -min(one.at, num_computed)
            params = SamplingParams(max_tokens=one.num_new, ignore_eos=True, seed=1, temperature=0.0)
            prompt = [rng.randrange(1000, 40_000) for _ in range(one.num_prompt)]
            by_id[engine.add_request(prompt, params, claim=True)] = one
        before, num_before = time.perf_counter(), num_computed
        result = engine.tick()
        now = time.perf_counter()
        num_computed += result.stats.num_computed
        for delta in result.deltas:
            one = by_id[delta.request_id]
            one.work += 0 if one.times else num_computed
            one.times += [now] * len(delta.token_ids)
    found = Measured(list(asked), num_computed, time.perf_counter() - started, time.process_time() - cpu_started)
    for request_id in by_id:
        engine.collect(request_id)
    return found


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the 50th, 95th and 99th percentile."""
    ordered = sorted(values)
    return [
        ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0 for share in (0.5, 0.95, 0.99)
    ]


def report(name: str, found: Measured) -> dict[str, dict[str, float]]:
    """Print a scenario's rows; return them as plain numbers."""
    rows: dict[str, dict[str, float]] = {}
    for kind in ("short", "other"):
        chosen = [one for one in found.asked if (one.num_prompt <= SHORT_TOKENS) == (kind == "short")]
        row: dict[str, float] = {"requests": len(chosen), "tokens_per_s": found.num_tokens / found.seconds}
        row["tokens_per_cpu_s"] = found.num_tokens / found.cpu_seconds
        columns = (
            ("ttft_ms", [1e3 * (one.times[0] - one.arrived) for one in chosen]),
            ("gap_ms", [1e3 * (after - before) for one in chosen for before, after in pairwise(one.times)]),
            ("work", [float(one.work) for one in chosen]),
        )
        for what, values in columns:
            row |= dict(zip((f"{what}_p50", f"{what}_p95", f"{what}_p99"), percentiles(values), strict=True))
        rows[kind] = row
        print(f"{name:<8}{kind:<7}" + "".join(f"{value:>9.0f}" for value in row.values()), flush=True)
    return rows


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--budget", type=int, default=256, help="tokens of a step at most; `serve` has 256 on a CPU")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path=arguments.model, num_threads=arguments.threads, max_tokens_per_batch=arguments.budget
    )
    head = [f"{what} {share}" for what in ("TTFT", "gap", "work") for share in ("p50", "p95", "p99")]
    print(f"{'':<15}{'requests':>9}{'tok/s':>9}{'tok/cpu s':>10}" + "".join(f"{name:>9}" for name in head))
    found: dict[str, dict[str, dict[str, float]]] = {}
    with InferenceEngine(config) as engine:
        run(engine, [Asked(at=0, num_prompt=300, num_new=4)], random.Random("warm-up"))
        for name in arguments.scenarios.split(","):
            total = Measured()
            for repetition in range(arguments.repeat):
                asked = make(name, repetition)
                once = run(engine, asked, random.Random(f"tokens of {name} {repetition}"))
                total.asked += once.asked
                total.num_tokens += once.num_tokens
                total.seconds += once.seconds
                total.cpu_seconds += once.cpu_seconds
            found[name] = report(name, total)
    print(json.dumps({"budget": arguments.budget, "scenarios": found}))


if __name__ == "__main__":
    main()
