"""Send real SIGINTs to an engine, and compare what it generates afterwards with a fresh one.

    python benchmarks/reliability/sigints.py [--each 100] [--seed 7]

A random Llama with the C kernels. A signal strikes in a plan, in a commit, in an update, in a stream (each at a random
call of the method that does the work, before or after it), or wherever a timer finds the engine.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[2])]

from nano_inference import EngineConfig, InferenceEngine, SamplingParams  # noqa: E402
from tests.core.test_driving import strike  # noqa: E402
from tests.models.families import make_model  # noqa: E402
from tests.sim.versioned import content  # noqa: E402

PROMPTS = [[5, 9, 30, 2, 44, 8, 1] * 5, [5, 9, 30, 2, 11] * 4, [3]]
PARAMS = SamplingParams(max_tokens=24, seed=4, ignore_eos=True, prompt_logprobs=0)


def main() -> int:
    """Strike at each place `--each` times; return 1 if an engine died, leaked or gave other tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=100, help="signals at each place")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_model("qwen3-ratio3-tied", Path(folder))
        config = EngineConfig(folder, device="cpu", kv_cache_bytes=1 << 18, max_tokens_per_batch=16, block_size=4)
        with InferenceEngine(config) as fresh:
            expected = content(generate(fresh))
            weights = {name: tensor.clone() for name, tensor in fresh.model.weights.values()}  # type: ignore[union-attr]
        with InferenceEngine(config) as engine:
            places: dict[str, tuple[object, str, int, Callable[[InferenceEngine], object]]] = {
                "plan": (engine.cache, "take", 20, generate),
                "commit": (engine.cache, "publish", 20, generate),
                "update": (engine.model, "commit", 1, lambda one: one.update_weights(weights, blocking=True)),
                "gathering": (engine.weight_sync, "stage", 1, lambda one: one.update_weights(weights, blocking=True)),
                "stream": (engine.parts.runner, "run", 20, stream),
                "timer": (None, "", 0, generate),
            }
            failures = 0
            for place, (owner, name, most, work) in places.items():
                faults = [
                    fault
                    for _ in range(options.each)
                    if (fault := once(engine, owner, name, rng.randint(1, max(most, 1)), work, rng, expected))
                ]
                failures += len(faults)
                print(f"{place:10} {options.each} signals, {len(faults)} faults {faults[:1] or ''}", flush=True)
    print(f"{options.each * len(places)} signals, {failures} faults")
    return int(failures > 0)


def generate(engine: InferenceEngine) -> Any:
    """Run three prompts with two samples each."""
    return engine.generate(PROMPTS, PARAMS, 2)


def stream(engine: InferenceEngine) -> None:
    """Read a stream to its end."""
    for _ in engine.stream(PROMPTS[0], PARAMS, 2):
        pass


def once(
    engine: InferenceEngine,
    owner: object,
    name: str,
    at: int,
    work: Callable[[InferenceEngine], object],
    rng: random.Random,
    expected: object,
) -> str | None:
    """Strike once; return what is wrong afterwards."""
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.MonkeyPatch.context() as patch:
            if owner is None:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
            else:
                strike(patch, owner, name, at, after=rng.random() < 0.5)
            for _ in range(1000):
                work(engine)
        return "not interrupted"
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if not engine.is_alive:
        return f"dead: {engine.failure}"
    if content(generate(engine)) != expected:
        return "other tokens"
    if engine.has_pending() or engine.cache.num_free_blocks() != engine.cache.num_blocks:
        return "requests or blocks are left"
    return None


if __name__ == "__main__":
    sys.exit(main())
