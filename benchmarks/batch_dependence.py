"""Measure how a row's result depends on its batch with torch's float32 operators, per operator and batch size.

For each batch size the same row is computed alone (or in the smallest batch) and with random other rows. Prints whether
the bits agree, and the largest difference. The last table is the model's own logits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.core.step import Row
from nano_inference.executors.batch import build
from nano_inference.executors.logprobs import normalise
from nano_inference.executors.opening import load_model
from nano_inference.executors.sampling import invert_cdf
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.executors.torch.ops import linear
from nano_inference.executors.torch.store import KVStore
from nano_inference.loading.catalog import default_cache, resolve
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.types import SamplingParams

BATCHES = (1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 49, 64, 96, 128)
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM, KEYS = 576, 1536, 49152, 9, 3, 64, 200


def operators() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each maps [B, HIDDEN or more] to [B, …], row by row in mathematics."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(960, HIDDEN, generator=generator) * 0.05
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05
    down = torch.randn(HIDDEN, INNER, generator=generator) * 0.05
    k = torch.randn(1, KV_HEADS, KEYS, HEAD_DIM, generator=generator)
    v = torch.randn(1, KV_HEADS, KEYS, HEAD_DIM, generator=generator)

    def attend(x: Tensor) -> Tensor:
        q = x[:, : HEADS * HEAD_DIM].reshape(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        rows = q.size(0)
        return functional.scaled_dot_product_attention(q, k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))

    return {
        "functional.linear 576->960": lambda x: functional.linear(x, qkv),
        "layers.linear 576->960": lambda x: linear(x, qkv, None),
        "layers.linear 1536->576": lambda x: linear(x.repeat(1, 3)[:, :INNER], down, None),
        "layers.linear 576->49152": lambda x: linear(x, head, None),
        "vector_norm (RMSNorm)": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
        "scaled_dot_product_attention": attend,
        "silu": functional.silu,
        "log-sum-exp over 49152": lambda x: normalise(x.repeat(1, 86)[:, :VOCAB], [1.0] * x.size(0)).log_mass,
        "invert_cdf (the draw)": lambda x: invert_cdf(
            x.repeat(1, 86)[:, :VOCAB], torch.full((x.size(0),), 0.37, dtype=torch.float64)
        ).double(),
    }


def row_gap(operator: Callable[[Tensor], Tensor], batch: int, mates: Tensor) -> float:
    """The largest difference of row 0 computed alone and among `batch` - 1 mates."""
    alone, among = operator(mates[:1])[0], operator(mates[:batch])[0]
    return float((alone - among).abs().max())


def print_table(title: str, rows: dict[str, list[float]]) -> None:
    """Print differences, `=` where the bits agree."""
    print(f"\n{title}\n{'batch':34}" + "".join(f"{batch:>8}" for batch in BATCHES))
    for name, gaps in rows.items():
        print(f"{name:34}" + "".join(f"{'=' if gap == 0 else f'{gap:.0e}':>8}" for gap in gaps))


def model_gaps(model: TorchExecutor, store: KVStore) -> list[float]:
    """The largest difference of one sequence's last logits alone and in batches of sequences, decoding."""
    prompts = [[(7 * row + 3 * i) % VOCAB for i in range(40)] for row in range(max(BATCHES))]

    def rows(start: int, end: int, count: int) -> tuple[Row, ...]:
        return tuple(
            Row(
                id=i,
                tokens=tuple(prompts[i][start:end]),
                prev_token=-1,
                start=start,
                blocks=tuple(range(3 * i, 3 * i + 3)),
                num_sampled=0,
                params=SamplingParams(),
                logprobs_mode="raw",
                seed=0,
                sample_index=0,
            )
            for i in range(count)
        )

    for row in rows(0, 39, len(prompts)):
        model.forward(build((row,), 16, torch.device("cpu")), store)
    results = [model.forward(build(rows(39, 40, b), 16, torch.device("cpu")), store)[0] for b in BATCHES]
    return [float((results[0] - result).abs().max()) for result in results]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    mates = torch.randn(max(BATCHES), HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        gaps = {name: [row_gap(op, batch, mates) for batch in BATCHES] for name, op in operators().items()}
    print_table(f"largest difference of a row from itself alone, float32, {threads} threads", gaps)
    checkpoint = open_checkpoint(resolve("default", default_cache(os.environ)))
    model = load_model(checkpoint, torch.device("cpu"), torch.float32, 8192)
    size = model.config
    store = KVStore(
        size.num_layers, 3 * max(BATCHES), 16, size.num_kv_heads, size.head_dim, torch.float32, torch.device("cpu")
    )
    whole = {"logits of the default model": model_gaps(model, store)}
    print_table("one decode step of the default model", whole)
    print(json.dumps({"threads": threads, "batches": BATCHES, "operators": gaps, "model": whole}))


if __name__ == "__main__":
    main()
