"""The engine section: whole engines with random weights, beside their bars and rooflines."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.cuda_parts.models import Bench, executor_of, open_random, random_weights
from benchmarks.cuda_parts.report import Sink
from nano_inference import InferenceEngine, SamplingParams

BARS = {
    "Qwen2.5-0.5B": {"H200": 70_000.0, "H100": 50_000.0, "one request": 1_400.0},
    "Qwen3-0.6B": {"H200": 26_000.0, "H100": 20_000.0, "one request": 1_200.0, "per GB/s": 6.0},
    "Llama-3.2-1B": {"H200": 45_000.0, "H100": 36_000.0, "one request": 1_100.0},
    "Qwen2.5-7B": {"H200": 11_600.0, "H100": 10_500.0, "one request": 235.0},
}
"""Tokens a second that the project wants to reach: with bench.py on each card and for each GB/s of a copy, and with
one request on an H200."""
GROUPS = ((16, 16, 1.5), (4, 64, 2.5))
"""Prompts, samples of each, and the bar of their ratio to the same without reading shared keys once."""
EXACT = {"bench.py": 0.9, "one request": 0.95}
"""Bars of the share of the speed that remains with `deterministic`."""
LARGEST_TOKEN = 10_000
"""Of bench.py; the generator's numbers, and so the lengths, depend on it."""


def model(bench: Bench, sink: Sink, name: str, *, has_update: bool = False) -> None:
    """Measure bench.py and one request, and an update."""
    with open_random(bench, name) as engine:
        sink.attempt(f"bench.py, {name}", lambda: bench_py(bench, sink, name, engine))
        sink.attempt(f"one request, {name}", lambda: one_request(bench, sink, name, engine))
        if has_update:
            sink.attempt(f"update, {name}", lambda: update(bench, sink, name, engine))


def exact(bench: Bench, sink: Sink, name: str) -> None:
    """Measure the same with `deterministic`."""
    with open_random(bench, name, is_deterministic=True) as engine:
        sink.attempt(f"deterministic bench.py, {name}", lambda: bench_py(bench, sink, name, engine, "deterministic "))
        sink.attempt(f"deterministic request, {name}", lambda: one_request(bench, sink, name, engine, "deterministic "))


def workload(bench: Bench, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts and numbers of tokens of bench.py; both are those of nano-vllm's script."""
    rng = random.Random(0)
    low, high, count = bench.sized(100, 4), bench.sized(1024, 12), bench.sized(256, 6)
    prompts = [
        [rng.randint(0, LARGEST_TOKEN) % vocab_size for _ in range(rng.randint(low, high))] for _ in range(count)
    ]
    return prompts, [rng.randint(low, high) for _ in range(count)]


def bench_py(bench: Bench, sink: Sink, name: str, engine: InferenceEngine, kind: str = "") -> None:
    """Measure generated tokens a second, prompts included, twice."""
    prompts, sizes = workload(bench, bench.shape(name).vocab_size)
    params = [SamplingParams(max_tokens=size, temperature=0.6, ignore_eos=True, seed=i) for i, size in enumerate(sizes)]
    most = _roofline(sink, engine, [len(prompt) for prompt in prompts], sizes)
    for run in ("bench.py, first run", "bench.py"):  # the first compiles kernels and captures graphs
        engine.flush_cache()
        started = time.perf_counter()
        samples = engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(sample.completion_tokens) for sample in samples)
        rate = num_tokens / seconds
        sink.add(f"{kind}{run}, {name}", rate, "tokens/s", **_beside(sink, "bench.py", name, kind, rate, most))


def _beside(sink: Sink, measured: str, name: str, kind: str, rate: float, roofline: float | None) -> dict[str, float]:
    """Return what a rate is compared with: its bar, and as far as they are known the roofline and other figures."""
    found: dict[str, float] = {}
    if kind:
        plain = sink.ceilings.get(f"{measured}, {name}")
        found = {"bar": EXACT[measured]} | ({} if plain is None else {"of not deterministic": rate / plain})
    elif measured == "one request" or sink.card in BARS[name]:
        found["bar"] = BARS[name]["one request" if measured == "one request" else sink.card]
    if roofline is not None:
        found |= {"roofline": roofline, "of roofline": rate / roofline}
    if "bytes" in sink.ceilings and measured == "bench.py":
        found["per GB/s"] = 1e9 * rate / sink.ceilings["bytes"]
        if not kind and "per GB/s" in BARS[name]:
            found["bar per GB/s"] = BARS[name]["per GB/s"]
    return found


def _roofline(
    sink: Sink, engine: InferenceEngine, lengths: Sequence[int], sizes: Sequence[int], *, has_prompts: bool = True
) -> float | None:
    """Return the tokens a second if steps took as long as reading weights and keys, and prompts as their products.

    None if the ceilings were not measured.
    """
    if not {"bytes", "flops"} <= sink.ceilings.keys():
        return None
    executor = executor_of(engine)
    program = executor.program
    per_token = program.kv_bytes_per_token(executor.dtype.itemsize)
    num_keys = sum(size * length + size * (size + 1) // 2 for length, size in zip(lengths, sizes, strict=True))
    seconds = (max(sizes) * step_bytes(engine) + num_keys * per_token) / sink.ceilings["bytes"]
    if has_prompts:
        num_values = sum(weight.numel() for name, weight in executor.weights.values() if name not in _tables(engine))
        seconds += 2.0 * num_values * sum(lengths) / sink.ceilings["flops"]
    return sum(sizes) / seconds


def _tables(engine: InferenceEngine) -> set[str]:
    """Return the names of the matrices that prompts do not multiply with: embedding and head."""
    program = executor_of(engine).program
    return {spec.name for spec in program.weights if spec.shape[0] == program.vocab_size}


def step_bytes(engine: InferenceEngine) -> int:
    """Return the bytes of weights that a decode step reads: all, and of two vocabulary tables only the head."""
    executor, tables = executor_of(engine), _tables(engine)
    sizes = [weight.nbytes for name, weight in executor.weights.values() if name in tables]
    return executor.weights.num_bytes - (sum(sizes) - max(sizes))


def one_request(bench: Bench, sink: Sink, name: str, engine: InferenceEngine, kind: str = "") -> None:
    """Measure decoding alone: the time of many tokens less that of one."""
    prompt, size = [1] * bench.sized(128, 8), bench.sized(512, 8)

    def seconds(num_tokens: int) -> float:
        engine.flush_cache()
        started = time.perf_counter()
        engine.generate([prompt], SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
        return time.perf_counter() - started

    seconds(size)
    rate = (size - 1) / max(1e-9, seconds(size) - seconds(1))
    most = _roofline(sink, engine, [len(prompt)], [size], has_prompts=False)
    sink.add(f"{kind}one request, {name}", rate, "tokens/s", **_beside(sink, "one request", name, kind, rate, most))


def update(bench: Bench, sink: Sink, name: str, engine: InferenceEngine) -> None:
    """Measure the longest tick while weights are updated under a full batch, beside an ordinary tick and the copy."""
    executor = executor_of(engine)
    named = {one: weight.cpu() for one, weight in random_weights(executor)}
    engine.update_weights(named, blocking=True)  # allocates the pinned memory
    params = SamplingParams(max_tokens=bench.sized(3_000, 200), temperature=0.6, ignore_eos=True, seed=1)
    for row in range(bench.sized(256, 4)):
        engine.add_request([1 + row % 99] * 16, params)
    for _ in range(4):
        engine.tick()
    ordinary = [_tick(engine) for _ in range(bench.sized(10, 2))]
    engine.update_weights(named)
    during = []
    while engine.weight_info().update != "idle" and engine.has_pending():
        during.append(_tick(engine))
    engine.abort_all()
    window = statistics.median(ordinary)
    if not during:
        raise RuntimeError("the batch ended before the update")
    copied = _copy_seconds(bench, engine, named)
    sink.add(f"longest tick with an update, {name}", 1e3 * max(during), "ms", bar=1e3 * (window + copied))
    sink.add(f"ordinary tick, {name}", 1e3 * window, "ms")
    rate = executor.weights.num_bytes / copied / 1e9
    sink.add(f"copy of staged weights, {name}", 1e3 * copied, "ms", **{"GB/s": rate})


def _tick(engine: InferenceEngine) -> float:
    started = time.perf_counter()
    engine.tick()
    return time.perf_counter() - started


def _copy_seconds(bench: Bench, engine: InferenceEngine, named: Mapping[str, torch.Tensor]) -> float:
    """Return the seconds of one copy of all weights from pinned memory to the device."""
    live = [weight for _, weight in executor_of(engine).weights.values()]
    staged = [weight.pin_memory() if bench.device.type == "cuda" else weight for weight in named.values()]
    bench.wait()
    started = time.perf_counter()
    for target, source in zip(live, staged, strict=True):
        target.copy_(source, non_blocking=True)
    bench.wait()
    return time.perf_counter() - started


def groups(bench: Bench, sink: Sink, name: str) -> None:
    """Measure samples of shared prompts with and without reading their keys once."""
    shared = _groups_rates(bench, name, reads_prefixes_once=True)
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # the next engine sizes its cache by what is free
    apart = _groups_rates(bench, name, reads_prefixes_once=False)
    for (count, num_samples, bar), rate, other in zip(GROUPS, shared, apart, strict=True):
        kind = f"{num_samples} samples of {count} prompts, {name}"
        sink.add(kind, rate, "tokens/s", **{"keys read by each row": other, "ratio": rate / other, "bar": bar})


def _groups_rates(bench: Bench, name: str, *, reads_prefixes_once: bool) -> list[float]:
    rng, vocab_size, rates = random.Random(1), bench.shape(name).vocab_size, list[float]()
    length, size = bench.sized(1024, 300), bench.sized(512, 4)
    params = SamplingParams(max_tokens=size, temperature=1.0, ignore_eos=True, seed=1)
    with open_random(bench, name, reads_prefixes_once=reads_prefixes_once) as engine:
        for count, num_samples, _ in GROUPS:
            prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(bench.sized(count, 2))]
            for _ in range(bench.sized(2, 1)):  # the first run compiles kernels and captures graphs
                engine.flush_cache()
                started = time.perf_counter()
                samples = engine.generate(prompts, params, bench.sized(num_samples, 3))
                seconds = time.perf_counter() - started
            rates.append(sum(len(sample.completion_tokens) for sample in samples) / seconds)
    return rates
