"""Measure how the engine slows down beside busy processes, and what options of a request cost.

    python benchmarks/busy.py [--model default] [--busy 1,2,4] [--tokens 24] [--rounds 3]

Prints tokens a second of one decoding row without options (`decode1`), with each option, with what the chat page sends
(`page`: temperature, top-p, min-p, raw log-probabilities and five alternatives), of 16 samples of a prompt with top-p
(`rollout`), and of a prompt's own log-probabilities with alternatives (`prompt`). With k busy processes on c cores, the
processes that want a core share c / (c + k) of the machine; a figure passes if it keeps half of that share of the quiet
one, and an option if it keeps 85 % of `decode1` on the quiet machine. Prompts are random, so that no cache has them.
Rounds alternate between the kinds; the best round counts. Exit status 1 if a figure fails.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harness import alternate, numbers, options, print_row, random_ids

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

OPTIONS: dict[str, dict[str, Any]] = {
    "decode1": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.05},
    "bias": {"logit_bias": {5: 2.0, 99: -4.0}},
    "penalty": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 5},
    "allowed": {"allowed_token_ids": list(range(1000, 30_000))},
    "page": {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "logprobs_mode": "raw", "logprobs": 5},
}
OFTEN = ("decode1", "top_p", "page", "rollout", "prompt")
"""Kinds that are measured beside busy processes."""
SHARE_OF_PLAIN, SHARE_OF_CORES = 0.85, 0.5


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that use one core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(1.5)  # until they have started
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_a_second(engine: InferenceEngine, kind: str, num_tokens: int) -> float:
    """Return the rate of one request with a new prompt, after its prompt was computed."""
    prompt = random_ids(random.Random(), 256 if kind == "prompt" else 32)
    if kind == "prompt":
        started = time.perf_counter()
        engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=5))
        return len(prompt) / (time.perf_counter() - started)
    options = {"top_p": 0.9} if kind == "rollout" else OPTIONS[kind]
    params = SamplingParams(max_tokens=num_tokens + 2, ignore_eos=True, seed=1, **options)
    engine.add_request(prompt, params, 16 if kind == "rollout" else 1)
    for _ in range(2):
        engine.tick()
    started = time.perf_counter()
    count = sum(len(delta.token_ids) for _ in range(num_tokens) for delta in engine.tick().deltas)
    seconds = time.perf_counter() - started
    while engine.has_pending():
        engine.step()
    return count / seconds


def measure(engine: InferenceEngine, kinds: Sequence[str], num_tokens: int, rounds: int) -> dict[str, float]:
    """Return each kind's best rate."""
    runs = {kind: lambda _, kind=kind: tokens_a_second(engine, kind, num_tokens) for kind in kinds}
    return {kind: max(rates) for kind, rates in alternate(runs, rounds).items()}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--busy", type=numbers, default=[1, 2, 4], help="numbers of busy processes")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    cores, has_failed = len(os.sched_getaffinity(0)), False
    config = EngineConfig(given.model, num_threads=given.threads, kv_cache_bytes=1 << 28)
    with InferenceEngine(config) as engine:
        quiet = measure(engine, [*OPTIONS, *OFTEN[-2:]], given.tokens, given.rounds)
        print_row(f"quiet, {cores} cores", "tokens/s", "of decode1")
        for kind, rate in quiet.items():
            share = rate / quiet["decode1"]
            is_low = kind in OPTIONS and share < SHARE_OF_PLAIN
            has_failed |= is_low
            print_row(kind, rate, share, f"below {SHARE_OF_PLAIN}" if is_low else "")
        for count in given.busy:
            least = SHARE_OF_CORES * cores / (cores + count)
            with busy(count):
                rates = measure(engine, OFTEN, given.tokens, given.rounds)
            print_row(f"{count} busy", "tokens/s", "of quiet", f"least {least:.2f}")
            for kind, rate in rates.items():
                is_low = rate < least * quiet[kind]
                has_failed |= is_low
                print_row(kind, rate, rate / quiet[kind], "below" if is_low else "")
    return has_failed


if __name__ == "__main__":
    sys.exit(main())
