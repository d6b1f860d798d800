"""One engine on one workload, in the engine's own environment: peer.py ENGINE MODEL MAX_LEN.

Reads [prompts, numbers of tokens] as JSON from stdin, runs them twice, and prints the seconds of the second run last.
"""

from __future__ import annotations

import importlib
import json
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


def main() -> None:
    """Measure."""
    engine, model, max_len = sys.argv[1:]
    prompts, sizes = json.load(sys.stdin)
    llm, kind = opened(engine, model, int(max_len))
    if engine == "vllm":
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [kind(temperature=0.6, ignore_eos=True, max_tokens=size) for size in sizes]
    for _ in range(2):
        started = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - started
    print(f"\n{seconds}")


if __name__ == "__main__":
    main()
