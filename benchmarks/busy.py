"""Measure how the engine slows down beside busy processes, and what options of a request cost.

    python benchmarks/busy.py [--model default] [--busy 0 1 2 4] [--tokens 24] [--rounds 3]

Prints tokens a second of one decoding row without options (`decode1`), with each option, with what the chat page sends
(`page`: temperature, top-p, min-p, raw log-probabilities and five alternatives), of 16 samples of a prompt with top-p
(`rollout`), and of a prompt's own log-probabilities with alternatives (`prompt`). With k busy processes on c cores, the
processes that want a core share c / (c + k) of the machine; a figure passes if it keeps half of that share of the quiet
one, and an option if it keeps 85 % of `decode1` on the quiet machine. Prompts are random, so that no cache has them.
Rounds alternate between the kinds; the best round counts. Exit status 1 if a figure fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

PAGE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "logprobs_mode": "raw", "logprobs": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "decode1": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.05},
    "bias": {"logit_bias": {5: 2.0, 99: -4.0}},
    "penalty": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 5},
    "allowed": {"allowed_token_ids": list(range(1000, 30_000))},
    "page": PAGE,
}
OFTEN = ("decode1", "top_p", "page", "rollout", "prompt")
"""Kinds that are measured beside busy processes."""
SHARE_OF_PLAIN, SHARE_OF_CORES = 0.85, 0.5


def spin() -> None:
    """Use one core."""
    while True:
        pass


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run busy processes, which have started when the block begins."""
    os.environ["PYTHONSAFEPATH"] = "1"  # a spawned Python would look for modules in the current directory first
    processes = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    time.sleep(1.5 if count else 0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def tokens_a_second(engine: InferenceEngine, kind: str, rng: random.Random, num_tokens: int) -> float:
    """Return the rate of one request with a new prompt, after its prompt was computed."""
    prompt = [rng.randrange(1000, 40_000) for _ in range(256 if kind == "prompt" else 32)]
    if kind == "prompt":
        started = time.perf_counter()
        engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=5))
        return len(prompt) / (time.perf_counter() - started)
    options = {"top_p": 0.9} if kind == "rollout" else OPTIONS[kind]
    params = SamplingParams(max_tokens=num_tokens + 2, ignore_eos=True, seed=1, **options)
    engine.add_request(prompt, params, 16 if kind == "rollout" else 1)
    count, started = 0, 0.0
    for step in range(num_tokens + 2):
        found = sum(len(delta.token_ids) for delta in engine.tick().deltas)
        if step < 2:
            started = time.perf_counter()
        else:
            count += found
    seconds = time.perf_counter() - started
    while engine.has_pending():
        engine.step()
    return count / seconds


def measure(
    engine: InferenceEngine, kinds: Sequence[str], args: argparse.Namespace, rng: random.Random
) -> dict[str, float]:
    """Return each kind's best rate; the rounds alternate between the kinds."""
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            rates[kind].append(tokens_a_second(engine, kind, rng, args.tokens))
    return {kind: max(found) for kind, found in rates.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of busy processes; first 0")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.busy[0] != 0:
        parser.error("--busy must start with 0: the other figures are compared with the quiet ones")
    rng, cores, failed = random.Random(), len(os.sched_getaffinity(0)), False
    with InferenceEngine(EngineConfig(args.model, kv_cache_bytes=1 << 28)) as engine:
        measure(engine, list(OPTIONS), argparse.Namespace(rounds=1, tokens=8), rng)
        quiet = measure(engine, [*OPTIONS, *OFTEN[-2:]], args, rng)
        print(f"quiet, {cores} cores".ljust(16), "tokens/s   share of decode1", flush=True)
        for kind, rate in quiet.items():
            share = rate / quiet["decode1"]
            is_low = kind in OPTIONS and share < SHARE_OF_PLAIN
            failed |= is_low
            print(f"{kind:16} {rate:8.1f}   {share:.2f}{f' below {SHARE_OF_PLAIN}' if is_low else ''}", flush=True)
        for count in args.busy[1:]:
            least = SHARE_OF_CORES * cores / (cores + count)
            with busy(count):
                rates = measure(engine, OFTEN, args, rng)
            print(f"{count} busy".ljust(16), f"tokens/s   share of quiet (at least {least:.2f})")
            for kind, rate in rates.items():
                is_low = rate < least * quiet[kind]
                failed |= is_low
                print(f"{kind:16} {rate:8.1f}   {rate / quiet[kind]:.2f}{' below' if is_low else ''}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
