"""The kernel table: the time of single launches at the sizes of a model, and their share of the measured ceilings.

Shapes: R rows, H heads, J kv heads, D head size, S slots, N outputs, K inputs, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cuda_parts.models import Bench, Shape
from nano_inference.executors.cuda.passes import PartialMemory
from nano_inference.executors.cuda.records import Cache, Rows, num_splits
from nano_inference.executors.cuda.sample_records import new_scratch
from nano_inference.executors.cuda.slots import MOST_TOPS, SlotMemory
from nano_inference.executors.cuda.vocabulary import VocabularyTables
from nano_inference.executors.torch.attention.context import AttentionSpec

BLOCK = 16


class Launch(NamedTuple):
    """One launch with what it must read and write, and its floating-point operations."""

    name: str
    run: Callable[[], None]
    num_bytes: float
    flops: float = 0.0


def seconds_of(bench: Bench, run: Callable[[], None], repeat: int = 20) -> float:
    """Return the median seconds of a call, after one that compiles."""
    run()
    bench.wait()
    found = []
    for _ in range(bench.sized(repeat, 2)):
        started = time.perf_counter()
        run()
        bench.wait()
        found.append(time.perf_counter() - started)
    return sorted(found)[len(found) // 2]


def launches(bench: Bench, shape: Shape) -> Iterator[Launch]:
    """Yield the launches of a decode step with many rows of 1,024 keys, and a chunk of as many tokens."""
    yield from _attention(bench, shape)
    yield from _rows(bench, shape)
    yield _sampler(bench, shape)


def _attention(bench: Bench, shape: Shape) -> Iterator[Launch]:
    num_rows, length = bench.sized(256, 4), bench.sized(1024, 300)
    heads, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_blocks = -(-length // BLOCK)
    k_SJD, v_SJD = (_random(bench, num_rows * num_blocks * BLOCK, num_kv, dim) for _ in range(2))
    table_RB = torch.arange(num_rows * num_blocks, dtype=torch.int32, device=bench.device).view(num_rows, num_blocks)
    cache, spec = Cache(k_SJD, v_SJD, table_RB, BLOCK), AttentionSpec(dim**-0.5)
    itemsize = k_SJD.element_size()
    q_RHD, out_RHD = _random(bench, num_rows, heads, dim), _random(bench, num_rows, heads, dim)
    start_R = torch.arange(num_rows + 1, dtype=torch.int32, device=bench.device)
    length_R = torch.full((num_rows,), length, dtype=torch.int32, device=bench.device)
    rows = Rows(start_R, length_R, torch.zeros_like(length_R))
    partials = PartialMemory(num_rows, num_splits(length), heads, dim, bench.device).views(num_rows, num_splits(length))

    def decode() -> None:
        bench.kernels.attend.attend_splits(partials, q_RHD, cache, rows, spec)
        bench.kernels.attend.merge_splits(out_RHD, partials, length_R - 1, None)

    yield Launch(f"decode attention, {num_rows} x {length}", decode, 2.0 * num_rows * length * num_kv * dim * itemsize)
    q_THD, out_THD = _random(bench, length, heads, dim), _random(bench, length, heads, dim)
    one = Rows(torch.tensor([0, length], dtype=torch.int32, device=bench.device), length_R[:1], rows.shared_R[:1])

    def chunk() -> None:
        bench.kernels.attend.attend_chunks(
            out_THD, q_THD, cache._replace(table_RB=table_RB[:1]), one, spec, max_queries=length
        )

    yield Launch(f"chunk attention, {length} tokens", chunk, 0.0, 2.0 * length * length * heads * dim)


def _rows(bench: Bench, shape: Shape) -> Iterator[Launch]:
    num_rows, width, inner = bench.sized(256, 4), shape.hidden_size, shape.intermediate_size
    x, more, total, out = (_random(bench, num_rows, width) for _ in range(4))
    weight = _random(bench, width)

    def norm() -> None:
        bench.kernels.operate.norm(out, x, weight, eps=1e-6, more_TW=more, sum_TW=total)

    yield Launch(f"add and norm, {num_rows} rows", norm, 4.0 * x.nbytes)
    gate_up, act = _random(bench, num_rows, 2 * inner), _random(bench, num_rows, inner)

    def activate() -> None:
        bench.kernels.operate.activate(act, gate_up[:, :inner], gate_up[:, inner:], "silu")

    yield Launch(f"gate, {num_rows} rows", activate, 3.0 * act.nbytes)
    weight_NK, few, product = _random(bench, 2 * inner, width), _random(bench, 1, width), _random(bench, 1, 2 * inner)
    part = torch.zeros(64 * 2 * inner, device=bench.device)

    def multiply() -> None:
        bench.kernels.multiply.multiply(product, few, weight_NK, None, part)

    yield Launch("product, 1 row", multiply, float(weight_NK.nbytes))
    many = _random(bench, num_rows, 2 * inner)

    def gemm() -> None:
        torch.mm(x, weight_NK.t(), out=many)

    flops = 2.0 * weight_NK.numel() * num_rows
    yield Launch(f"product (cuBLAS), {num_rows} rows", gemm, float(weight_NK.nbytes), flops)


def _sampler(bench: Bench, shape: Shape) -> Launch:
    num_rows = bench.sized(256, 4)
    logits = _random(bench, num_rows, shape.vocab_size)
    slots = SlotMemory(num_rows, 1, 16, bench.device)
    slots.fields["temperature"][:] = 0.6
    for name in ("count_row", "bias_row", "mask_row"):
        slots.fields[name][:] = -1
    slots.push()
    scratch = new_scratch(num_rows, shape.vocab_size, MOST_TOPS, bench.device)
    tables = VocabularyTables(shape.vocab_size, bench.device).tables

    def draw() -> None:
        bench.kernels.sample.adjust(scratch, logits, slots.slot_S, slots.slots, tables)
        bench.kernels.sample.draw(scratch, logits, slots.slot_S, slots.slots, has_cut=False)

    return Launch(f"sampler, {num_rows} rows", draw, float(logits.nbytes) + 2.0 * scratch.work.nbytes)


def _random(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device).to(bench.dtype)
