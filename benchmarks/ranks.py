"""Compare a model that is divided among ranks with the same model in one process, on the same cores.

    python benchmarks/ranks.py [--ranks 2] [--threads 2] [--tokens 64] [--rounds 3] [--model DIRECTORY]

Prints tokens a second of one process with `--threads` threads (C kernels, and torch, which ranks use) and of `--ranks`
processes with threads / ranks each: decoding with 1 and 8 rows, and a prompt of 512 tokens. Rounds alternate; the best
of each counts. Below the table, bytes of a step: the message with which rank 0 starts it, and the tensors that it
contributes to sums and exchanges (logits would be rows * vocabulary * 4). Without `--model`, a random Llama of 110
million parameters is used (12 layers, 12 heads, a vocabulary of 32,768). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.parallel.executor import ShardedExecutor

PROMPT_TOKENS = 512


def write_model(path: Path) -> None:
    """Write a random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32768,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def decode(engine: InferenceEngine, num_rows: int, num_tokens: int) -> float:
    """Return the decoded tokens a second of some rows."""
    params = SamplingParams(max_tokens=num_tokens, seed=1, ignore_eos=True)
    ids = [engine.add_request([index + 5, 9, 7, 3], params, claim=True) for index in range(num_rows)]
    engine.tick()  # the prompts
    start = time.perf_counter()
    while engine.has_pending():
        engine.tick()
    seconds = time.perf_counter() - start
    for one in ids:
        engine.collect(one)
    return num_rows * (num_tokens - 1) / seconds


def prefill(engine: InferenceEngine, seed: int) -> float:
    """Return the tokens a second of a prompt that is not cached."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(5, 30000, (PROMPT_TOKENS,), generator=generator).tolist()
    start = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=1, seed=1))
    return PROMPT_TOKENS / (time.perf_counter() - start)


def bytes_of_steps(engine: InferenceEngine, num_rows: int, num_tokens: int) -> dict[str, float]:
    """Return the bytes of a decoding step on average: of the message that starts it, and of rank 0's tensors."""
    executor = engine.parts.executor
    assert isinstance(executor, ShardedExecutor)
    message, tensors = executor.bytes_sent, executor.tensor_bytes
    decode(engine, num_rows, num_tokens)
    return {
        "message": round((executor.bytes_sent - message) / num_tokens, 1),
        "tensors": round((executor.tensor_bytes - tensors) / num_tokens, 1),
    }


def main() -> None:
    """Open the engines one after the other in each round, and print the best figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or Path(directory)
        if options.model is None:
            write_model(path)
        print(json.dumps(compare(path, options)))


def compare(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the best tokens a second by engine and work, and the bytes of a step by rows."""
    each = max(1, options.threads // options.ranks)
    kinds = {
        f"C kernels, {options.threads} threads": {"num_threads": options.threads},
        f"torch, {options.threads} threads": {"num_threads": options.threads, "kernels": "off"},
        f"{options.ranks} ranks, {each} threads each": {"num_threads": each, "tensor_parallel": options.ranks},
    }
    work: dict[str, Callable[[InferenceEngine, int], float]] = {
        "decode, 1 row": lambda engine, _: decode(engine, 1, options.tokens),
        "decode, 8 rows": lambda engine, _: decode(engine, 8, options.tokens),
        f"prompt of {PROMPT_TOKENS}": prefill,
    }
    best: dict[str, dict[str, float]] = {kind: dict.fromkeys(work, 0.0) for kind in kinds}
    sent: dict[int, dict[str, float]] = {}
    for index in range(options.rounds):
        for kind, changes in kinds.items():
            config = {"model_path": str(path), "device": "cpu", "kv_cache_bytes": 256 << 20, **changes}
            with InferenceEngine(EngineConfig.from_dict(config)) as engine:
                decode(engine, 8, 4)
                for name, run in work.items():
                    best[kind][name] = max(best[kind][name], run(engine, index))
                if "tensor_parallel" in changes and not sent:
                    sent = {rows: bytes_of_steps(engine, rows, options.tokens) for rows in (1, 8, 32)}
    print(f"{'tokens/s':<28}" + "".join(f"{name:>18}" for name in work))
    for kind, figures in best.items():
        print(f"{kind:<28}" + "".join(f"{value:>18.1f}" for value in figures.values()))
    for rows, sizes in sent.items():
        print(f"bytes of a step, {rows} rows: message {sizes['message']:.0f}, tensors {sizes['tensors']:.0f}")
    return {"tokens_per_second": best, "bytes_of_a_step": sent}


if __name__ == "__main__":
    main()
