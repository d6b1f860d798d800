"""The peers section: bench.py's requests by Transformers' continuous batching, and by engines of other environments.

Also the launch that FlashInfer has: decode attention, on the rows of the kernels section.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.cuda_parts.engines import workload
from benchmarks.cuda_parts.models import MAX_LEN, Bench
from benchmarks.cuda_parts.report import UNIT_SECONDS, Sink

ENGINES = ("vllm", "nano-vllm", "mini-sglang")


def transformers_batching(bench: Bench, sink: Sink, name: str) -> None:
    """Measure generated tokens a second of a model with random weights, twice as `engines.bench_py` does."""
    if importlib.util.find_spec("transformers") is None:
        sink.add(f"Transformers, {name}", "skipped: Transformers is not installed")
        return
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    shape = bench.shape(name)
    config = AutoConfig.for_model(
        "qwen3" if shape.has_head_norm else "qwen2" if shape.has_bias else "llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=MAX_LEN,
    )
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype).eval()
    prompts, sizes = workload(bench, shape.vocab_size)
    sampling = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64) if bench.is_dry else None
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching)
    manager.start()
    for run in ("first run, ", ""):
        started = time.perf_counter()
        for prompt, size in zip(prompts, sizes, strict=True):
            manager.add_request(prompt, max_new_tokens=size)
        results = [manager.get_result(timeout=UNIT_SECONDS) for _ in prompts]
        _add(sink, f"Transformers, {run}{name}", name, results_tokens(results), time.perf_counter() - started)
    manager.stop(block=True)


def results_tokens(results: list[object]) -> int:
    """Return how many tokens came. Raises `RuntimeError` if a request has none."""
    counts = [len(getattr(one, "generated_tokens", ())) for one in results]
    if not all(counts):
        raise RuntimeError(next((str(getattr(one, "error", one)) for one in results if one), "no request has ended"))
    return sum(counts)


def engine_of(bench: Bench, sink: Sink, name: str, engine: str, home: Path) -> None:
    """Measure an engine in its own environment, on a checkpoint of the model."""
    prompts, sizes = workload(bench, bench.shape(name).vocab_size)
    seconds = _asked(sink, f"{engine}, {name}", home / engine, [home / name, MAX_LEN], [prompts, sizes])
    if seconds is not None:
        _add(sink, f"{engine}, {name}", name, sum(sizes), seconds)


def flashinfer(bench: Bench, sink: Sink, name: str, home: Path) -> None:
    """Measure decode attention by FlashInfer."""
    shape, num_rows, length = bench.shape(name), bench.sized(256, 4), bench.sized(1024, 300)
    figure = f"decode attention, {num_rows} x {length}, {name}"
    sizes = [num_rows, length, shape.num_heads, shape.num_kv_heads, shape.head_dim]
    seconds = _asked(sink, f"flashinfer, {name}", home / "flashinfer", [], sizes)
    if seconds is not None:
        ours = sink.ceilings.get(figure)
        more = {} if ours is None else {"ours": ours, "ours is": 1e6 * seconds / ours}
        sink.add(f"flashinfer, {figure}", 1e6 * seconds, "µs", **more)


def _asked(sink: Sink, figure: str, home: Path, arguments: list[object], given: Any) -> float | None:
    """Return the seconds that peer.py measures in an environment; None, and a figure that says so, if it is absent."""
    python = home / "bin" / "python"
    absent = next((one for one in (python, *arguments) if isinstance(one, Path) and not one.exists()), None)
    if absent is not None:
        sink.add(figure, f"skipped: no {absent}")
        return None
    command = [str(one) for one in (python, Path(__file__).with_name("peer.py"), home.name, *arguments)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=UNIT_SECONDS - 10)
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    return float(done.stdout.splitlines()[-1])


def _add(sink: Sink, figure: str, name: str, num_tokens: int, seconds: float) -> None:
    ours, rate = sink.ceilings.get(f"bench.py, {name}"), num_tokens / seconds
    sink.add(figure, rate, "tokens/s", **({} if ours is None else {"ours": ours, "ours is": ours / rate}))
