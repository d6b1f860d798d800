"""Compare a model that is divided among ranks with the same model in one process, on the same cores.

    python benchmarks/ranks.py [--ranks 2] [--threads 2] [--tokens 64] [--rounds 3] [--model DIRECTORY]

Prints tokens a second of one process with `--threads` threads (C kernels, and torch, which ranks use) and of `--ranks`
processes with threads / ranks each: decoding with 1 and 8 rows, and a prompt of 512 tokens. Rounds alternate; the best
of each counts. Without `--model`, a random Llama of 110 million parameters is used (12 layers, 12 heads, a vocabulary
of 32,768). The last line is JSON.
"""

from __future__ import annotations

import json
import random
import tempfile
import time

import torch
from harness import options, print_row, random_ids
from transformers import LlamaConfig, LlamaForCausalLM

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

PROMPT_TOKENS = 512


def write_model(path: str) -> None:
    """Write a random Llama."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": 2048}
    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, **heads)
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
    prompt = [token % 30_000 for token in random_ids(random.Random(seed), PROMPT_TOKENS)]
    start = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=1, seed=1))
    return PROMPT_TOKENS / (time.perf_counter() - start)


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(threads=2, model="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    each = max(1, given.threads // given.ranks)
    kinds = {
        f"C kernels, {given.threads} threads": {"num_threads": given.threads},
        f"torch, {given.threads} threads": {"num_threads": given.threads, "kernels": "off"},
        f"{given.ranks} ranks, {each} threads each": {"num_threads": each, "tensor_parallel": given.ranks},
    }
    best = {kind: [0.0, 0.0, 0.0] for kind in kinds}
    with tempfile.TemporaryDirectory() as directory:
        if not given.model:
            write_model(directory)
        same = {"model_path": given.model or directory, "device": "cpu", "kv_cache_bytes": 256 << 20}
        for number in range(given.rounds):
            for kind, changes in kinds.items():
                with InferenceEngine(EngineConfig.from_dict({**same, **changes})) as engine:
                    decode(engine, 8, 4)
                    rates = (decode(engine, 1, given.tokens), decode(engine, 8, given.tokens), prefill(engine, number))
                    best[kind] = [max(pair) for pair in zip(best[kind], rates, strict=True)]
    print_row("tokens/s", "1 row", "8 rows", f"prompt of {PROMPT_TOKENS}")
    for kind, figures in best.items():
        print_row(kind, *figures)
    print(json.dumps({"tokens_per_second": best}))


if __name__ == "__main__":
    main()
