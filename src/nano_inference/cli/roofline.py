"""Shares of this machine's memory bandwidth and arithmetic rate that the default model reaches."""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any, NamedTuple

from nano_inference.assemble import locate
from nano_inference.cli import machine
from nano_inference.config import Dtype, EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.models.ops import Attend, Linear
from nano_inference.models.program import Program
from nano_inference.types import SamplingParams

_REPEAT = 3


class Amounts(NamedTuple):
    """Tokens of the measured prompt and answer."""

    prefill: int = 2048
    decode: int = 96


def measure(amounts: Amounts, name: str = "default") -> dict[str, dict[str, Any]]:
    """Return the machine's rates and the shares reached with weights in the file's dtype, bfloat16 and int8.

    Decode share = bytes of weights * tokens per second / torch's read bandwidth.
    Prefill share = operations per second / torch's rate of a float32 matrix product. Each is a median of three.
    """
    bandwidth, rate = machine.read_bandwidth(), machine.gemm_rate()
    found: dict[str, dict[str, Any]] = {
        "measured": {"read_bytes_per_s": bandwidth, "float32_flops_per_s": rate},
    }
    dtypes: tuple[Dtype, ...] = ("auto", "bfloat16", "int8")
    for dtype in dtypes:
        found[f"weights {dtype}"] = _shares(name, dtype, amounts, bandwidth, rate)
    return found


def _shares(name: str, dtype: Dtype, amounts: Amounts, bandwidth: float, rate: float) -> dict[str, Any]:
    """Measure one engine."""
    config = EngineConfig(model_path=str(locate(name)), device="cpu", dtype=dtype, max_model_len=4096)
    with InferenceEngine(config) as engine:
        executor = engine.parts.executor
        assert executor is not None
        weight_bytes = executor.weight_bytes
        flops = prefill_flops(executor.program, amounts.prefill)
        decode = statistics.median(_decode_rate(engine, amounts.decode, index) for index in range(_REPEAT))
        prefill = statistics.median(_prefill_seconds(engine, amounts.prefill, index) for index in range(_REPEAT))
    return {
        "code": executor.code,
        "weight_bytes": weight_bytes,
        "decode_tokens_per_s": decode,
        "decode_bytes_per_s": decode * weight_bytes,
        "decode_share": decode * weight_bytes / bandwidth,
        "prefill_tokens_per_s": amounts.prefill / prefill,
        "prefill_flops_per_s": flops / prefill,
        "prefill_share": flops / prefill / rate,
    }


def prefill_flops(program: Program, num_tokens: int) -> float:
    """Return the floating-point operations of a prompt's forward pass: matrix products and causal attention."""
    products = sum(math.prod(spec.shape) for op in program.body if isinstance(op, Linear) for spec in op.matrices)
    attention = sum(num_tokens / 2 * 2 * op.num_heads * op.head_dim for op in program.body if isinstance(op, Attend))
    return 2.0 * num_tokens * (products + attention)


def _prompt(size: int, index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(1000, 40_000) for _ in range(size)]


def _decode_rate(engine: InferenceEngine, num_tokens: int, index: int) -> float:
    """Return tokens per second between the first and the last token of a short answer."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    times = [time.perf_counter() for _ in engine.stream(_prompt(32, index), params)]
    return (len(times) - 1) / (times[-1] - times[0])


def _prefill_seconds(engine: InferenceEngine, num_tokens: int, index: int) -> float:
    """Return the seconds of a prompt's prefill."""
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.generate([_prompt(num_tokens, 1000 + index)], params)
    return time.perf_counter() - start
