"""This engine as a worker: nano.py MODEL THREADS DTYPE."""

from __future__ import annotations

import sys
import time

from protocol import Request, serve, take_stdout

import nano_inference
from nano_inference import EngineConfig, InferenceEngine, SamplingParams


def main() -> None:
    """Load the model and answer workloads."""
    out = take_stdout()
    model, threads, dtype = sys.argv[1:4]
    engine = InferenceEngine(
        EngineConfig(model, device="cpu", num_threads=int(threads), dtype=dtype, kv_cache_bytes=1 << 30)
    )
    store = getattr(engine.parts.runner, "store", None)
    if hasattr(store, "wait_for_pages"):  # as the peers' caches, it has its memory before the first request
        store.wait_for_pages(60)

    def run(requests: list[Request]) -> tuple[float | None, int]:
        first, total = None, 0
        for seed, request in enumerate(requests):
            params = SamplingParams(
                temperature=request["temperature"], max_tokens=request["new_tokens"], ignore_eos=True, seed=seed
            )
            engine.add_request(request["prompt"], params, request["num_samples"])
        left = sum(request["num_samples"] for request in requests)
        while left:
            result = engine.tick()
            first = first or (time.perf_counter() if result.deltas else None)
            total += sum(len(delta.token_ids) for delta in result.deltas)
            left -= len(result.samples)
        engine.step()  # takes the samples that `tick` put aside
        return first, total

    serve(run, nano_inference.__version__, out)


if __name__ == "__main__":
    main()
