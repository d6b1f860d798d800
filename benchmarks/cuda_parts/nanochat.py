"""The nanochat section: d12 and d20 with random weights, by the arithmetic of nanochat's scripts/infer_bench.py.

A prompt is answered greedily by several rows. MFU and MBU are shares of the data sheet's operations and bytes a second:
operations of a token, and bytes of all weights and of each row's keys and values at the middle of the answer. Rows are
equal there as here, but this engine reads the keys that they share once.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time

from benchmarks.cuda_parts.models import Bench, executor_of, open_program
from benchmarks.cuda_parts.report import Sink
from nano_inference import InferenceEngine, SamplingParams

DEPTHS = (12, 20)
ROWS = (1, 8, 32, 128)
PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12)}
"""Bytes, and bfloat16 operations, a second."""


def nanochat(bench: Bench, sink: Sink, depth: int) -> None:
    """Measure the prompt of one row, and the time to the first and to each later token of several rows."""
    if importlib.util.find_spec("tiktoken") is None:
        sink.add(f"d{depth}", "skipped: tiktoken is not installed")
        return
    from nano_inference.nanochat.gpt import GPT
    from tests.nanochat.tiny import model_config, state_dict

    heads = depth // 2
    shape = {"n_layer": depth, "n_head": heads, "n_kv_head": heads, "n_embd": 64 * depth}
    sizes = {} if bench.is_dry else {**shape, "sequence_len": 2048, "vocab_size": 32768}
    config = model_config("G4", **sizes)
    model = GPT.from_state_dict(state_dict("G4", config), config, device=str(bench.device))
    size = bench.sized(256, 12)
    rng, length = random.Random(0), config["sequence_len"] - size
    prompt = [rng.randrange(256) for _ in range(length)]
    bandwidth, flops = PEAKS[sink.card]
    read = model.kv_read_bytes(length + size // 2)
    computed = model.estimate_decode_flops(length + size // 2)
    with open_program(bench, model.model.config, model.model.program, model.refresh) as engine:
        num_bytes = executor_of(engine).weights.num_bytes
        answer(engine, prompt, 1, 2)  # compiles kernels
        first, _ = answer(engine, prompt, 1, 2)
        mfu = model.estimate_prefill_flops(length) / first / flops
        sink.add(f"prompt of {length} tokens, d{depth}", length / first, "tokens/s", MFU=mfu)
        for rows in ROWS[: bench.sized(len(ROWS), 2)]:
            answer(engine, prompt, rows, bench.sized(32, 4))  # captures graphs
            first, steps = answer(engine, prompt, rows, size)
            step = statistics.median(steps)
            more = {"ms to the first": 1e3 * first, "ms a token": 1e3 * step}
            more |= {"MBU": (num_bytes + rows * read) / step / bandwidth, "MFU": rows * computed / step / flops}
            sink.add(f"{rows} rows, d{depth}", rows * len(steps) / sum(steps), "tokens/s", **more)


def answer(engine: InferenceEngine, prompt: list[int], num_rows: int, size: int) -> tuple[float, list[float]]:
    """Return the seconds until each row has its first token, and those of each later one; a window's are equal."""
    engine.flush_cache()
    params = SamplingParams(max_tokens=size, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    request = engine.add_request(prompt, params, num_rows, claim=True)
    count = 0
    while count < num_rows:
        count += engine.tick().stats.num_sampled
    first = time.perf_counter() - started
    steps: list[float] = []
    while engine.has_pending():
        started = time.perf_counter()
        count = engine.tick().stats.num_sampled
        steps += [(time.perf_counter() - started) * num_rows / count] * (count // num_rows)
    engine.collect(request)
    return first, steps
