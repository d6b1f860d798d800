"""One engine on one workload, in the engine's own environment: peer.py ENGINE MODEL MAX_LEN, or peer.py flashinfer.

Reads [prompts, numbers of tokens] as JSON from stdin, runs them twice, and prints the seconds of the second run last.
FlashInfer reads [rows, keys of each, heads, key heads, head size] and prints the seconds of decode attention.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import Any


def opened(engine: str, model: str, max_len: int) -> tuple[Any, Any]:
    """Return an engine, and its class of sampling parameters."""
    if engine == "mini-sglang":
        most: dict[str, Any] = {"max_seq_len_override": max_len, "max_extend_tokens": 16384, "cuda_graph_max_bs": 256}
        llm = importlib.import_module("minisgl.llm").LLM(model, **most)
        return llm, importlib.import_module("minisgl.core").SamplingParams
    module = importlib.import_module({"vllm": "vllm", "nano-vllm": "nanovllm"}[engine])
    return module.LLM(model, max_model_len=max_len), module.SamplingParams


def decode_attention(num_rows: int, length: int, num_heads: int, num_kv_heads: int, head_dim: int) -> float:
    """Return the median seconds of a replayed launch in bfloat16, with blocks of 16 tokens and a cold L2 cache."""
    import torch

    block, bf16 = 16, torch.bfloat16
    num_blocks = -(-length // block)
    with torch.device("cuda"):
        workspace, flush = (torch.empty(size << 20, dtype=torch.uint8) for size in (128, 256))
        q_RHD = torch.randn(num_rows, num_heads, head_dim, dtype=bf16)
        cache = torch.randn(num_rows * num_blocks, 2, block, num_kv_heads, head_dim, dtype=bf16)
        start_R = torch.arange(num_rows + 1, dtype=torch.int32) * num_blocks
        last_R = torch.full((num_rows,), (length - 1) % block + 1, dtype=torch.int32)
        block_I = torch.arange(num_rows * num_blocks, dtype=torch.int32)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=num_heads > num_kv_heads
    )
    sizes = (num_heads, num_kv_heads, head_dim, block)
    wrapper.plan(start_R, block_I, last_R, *sizes, q_data_type=bf16, kv_data_type=bf16)
    wrapper.run(q_RHD, cache)  # compiles
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        wrapper.run(q_RHD, cache)
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(1e-3 * before.elapsed_time(after))
    return statistics.median(times)


def generate(engine: str, model: str, max_len: int, prompts: list[Any], sizes: list[int]) -> float:
    """Return the seconds of the second of two runs."""
    llm, kind = opened(engine, model, max_len)
    if engine == "vllm":
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [kind(temperature=0.6, ignore_eos=True, max_tokens=size) for size in sizes]
    for _ in range(2):
        started = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - started
    return seconds


def main() -> None:
    """Measure."""
    engine, *more = sys.argv[1:]
    given = json.load(sys.stdin)
    seconds = decode_attention(*given) if engine == "flashinfer" else generate(engine, more[0], int(more[1]), *given)
    print(f"\n{seconds}")


if __name__ == "__main__":
    main()
