"""The kernel table: the time of single launches at the sizes of a model, and their share of the measured ceilings.

Shapes: R rows, H heads, J kv heads, D head size, S slots, N outputs, K inputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.cuda_parts.models import Bench, Shape
from benchmarks.cuda_parts.report import Sink
from benchmarks.cuda_parts.timing import seconds_of
from nano_inference.executors.cuda import records
from nano_inference.executors.cuda.passes import PartialMemory
from nano_inference.executors.cuda.records import (
    SPLIT,
    Cache,
    Groups,
    Partials,
    Rows,
    SumNorm,
    group_rows,
    num_splits,
    range_memory,
)
from nano_inference.executors.cuda.sample_records import new_scratch
from nano_inference.executors.cuda.slots import MOST_TOPS, SlotMemory
from nano_inference.executors.cuda.vocabulary import VocabularyTables
from nano_inference.executors.cuda.windows import Prefix, group_tables
from nano_inference.executors.torch.attention.context import AttentionSpec

BLOCK = 16


class Launch(NamedTuple):
    """One launch with what it must read and write, and its floating-point operations."""

    name: str
    run: Callable[[], None]
    num_bytes: float
    flops: float = 0.0


def kernels(bench: Bench, sink: Sink, name: str) -> None:
    """Measure the launches of a decode step with many rows of 1,024 keys, and a chunk of as many tokens."""
    shape = bench.shape(name)
    for part in (_decode, _groups, _chunk, _rows, _sampler):
        sink.attempt(f"{part.__name__.strip('_')}, {name}", partial(_measure, bench, sink, name, part(bench, shape)))


def _measure(bench: Bench, sink: Sink, name: str, found: Iterable[Launch]) -> None:
    for launch in found:
        seconds = seconds_of(bench, launch.run)
        more: dict[str, float] = {}
        if launch.num_bytes:
            more["MB"] = launch.num_bytes / 1e6
            if "bytes" in sink.ceilings:
                more["of copy"] = launch.num_bytes / seconds / sink.ceilings["bytes"]
        if launch.flops:
            more["GFLOP"] = launch.flops / 1e9
            if "flops" in sink.ceilings:
                more["of GEMM"] = launch.flops / seconds / sink.ceilings["flops"]
        sink.add(f"{launch.name}, {name}", 1e6 * seconds, "µs", **more)


class _World(NamedTuple):
    """A cache full of keys, and decode rows of the same length that each have their own blocks."""

    cache: Cache
    rows: Rows
    length: int
    spec: AttentionSpec
    row_bytes: float
    """Keys and values of one row."""


def _world(bench: Bench, shape: Shape) -> _World:
    num_rows, length = bench.sized(256, 4), bench.sized(1024, 300)
    num_blocks = -(-length // BLOCK)
    k_SJD, v_SJD = (_random(bench, num_rows * num_blocks * BLOCK, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    table_RB = torch.arange(num_rows * num_blocks, dtype=torch.int32, device=bench.device).view(num_rows, num_blocks)
    start_R = torch.arange(num_rows + 1, dtype=torch.int32, device=bench.device)
    length_R = torch.full((num_rows,), length, dtype=torch.int32, device=bench.device)
    row_bytes = 2.0 * length * shape.num_kv_heads * shape.head_dim * k_SJD.element_size()
    rows = Rows(start_R, length_R, torch.zeros_like(length_R))
    spec = AttentionSpec(shape.head_dim**-0.5)
    return _World(Cache(k_SJD, v_SJD, table_RB, BLOCK), rows, length, spec, row_bytes)


def _partials(bench: Bench, shape: Shape, num_rows: int, length: int) -> Partials:
    splits = num_splits(length)
    return PartialMemory(num_rows, splits, shape.num_heads, shape.head_dim, bench.device).views(num_rows, splits)


def _decode(bench: Bench, shape: Shape) -> Iterator[Launch]:
    world = _world(bench, shape)
    num_rows = len(world.rows.length_R)
    q_RHD, out_RHD = (_random(bench, num_rows, shape.num_heads, shape.head_dim) for _ in range(2))
    partials, last_R = _partials(bench, shape, num_rows, world.length), world.rows.length_R - 1

    def decode() -> None:
        bench.kernels.attend.attend_splits(partials, q_RHD, world.cache, world.rows, world.spec)
        bench.kernels.attend.merge_splits(out_RHD, partials, last_R, None)

    yield Launch(f"decode attention, {num_rows} x {world.length}", decode, num_rows * world.row_bytes)


def _groups(bench: Bench, shape: Shape) -> Iterator[Launch]:
    """Yield `_grouped` and its parts, then with other sizes of tiles."""
    yield from _grouped(bench, shape)
    for rows in (32, 128):
        with patch.object(records, "GROUP_ROWS", rows):
            if records.group_tile(bench.dtype, shape.head_dim) == rows:
                whole, *_ = _grouped(bench, shape)
                yield whole._replace(name=f"{whole.name}, tiles of {rows}")


def _grouped(bench: Bench, shape: Shape) -> Iterator[Launch]:
    """Yield decode attention of rows of which each sixteen share all keys but those of the last, partial split."""
    world = _world(bench, shape)
    num_rows, width = world.rows.length_R.numel(), bench.sized(16, 2)
    table_RB = world.cache.table_RB.clone()
    num_shared = (world.length - 1) // SPLIT * SPLIT
    table_RB[:, : num_shared // BLOCK] = table_RB[::width, : num_shared // BLOCK].repeat_interleave(width, 0)
    cache = world.cache._replace(table_RB=table_RB)
    prefixes = [Prefix(tuple(range(start, start + width)), num_shared) for start in range(0, num_rows, width)]
    rows_of_tile = group_rows(shape.num_heads // shape.num_kv_heads, bench.dtype, shape.head_dim)
    tables = group_tables(prefixes, num_rows, num_rows // 2, rows_of_tile)
    shared_R, row_QX, shared_Q = (torch.from_numpy(one).to(bench.device) for one in tables)
    rows, groups = world.rows._replace(shared_R=shared_R), Groups(row_QX, shared_Q)
    none, ungrouped = torch.zeros_like(rows.length_R), groups._replace(shared_Q=torch.zeros_like(shared_Q))
    q_RHD, out_RHD = (_random(bench, num_rows, shape.num_heads, shape.head_dim) for _ in range(2))
    partials, last_R = _partials(bench, shape, num_rows, world.length), rows.length_R - 1

    def decode() -> None:
        bench.kernels.attend.attend_groups(partials, q_RHD, cache, rows, groups, world.spec)
        bench.kernels.attend.merge_splits(out_RHD, partials, last_R, None)

    share = num_shared / world.length
    num_bytes = num_rows * world.row_bytes * (share / width + 1 - share)
    yield Launch(f"the same in groups of {width}", decode, num_bytes)
    parts = {
        "shared keys": (rows._replace(length_R=shared_R), groups, num_rows * world.row_bytes * share / width),
        "other keys": (rows, ungrouped, num_rows * world.row_bytes * (1 - share)),
        "no keys": (rows._replace(length_R=none, shared_R=none), ungrouped, 0.0),
    }
    for name, (some_rows, some_groups, size) in parts.items():
        attend = partial(bench.kernels.attend.attend_groups, partials, q_RHD, cache, some_rows, some_groups, world.spec)
        yield Launch(f"of that {name}", attend, size)
    yield Launch("of that merging", partial(bench.kernels.attend.merge_splits, out_RHD, partials, last_R, None), 0.0)


def _chunk(bench: Bench, shape: Shape) -> Iterator[Launch]:
    world = _world(bench, shape)
    length, cache = world.length, world.cache._replace(table_RB=world.cache.table_RB[:1])
    q_THD, out_THD = (_random(bench, length, shape.num_heads, shape.head_dim) for _ in range(2))
    start_R = torch.tensor([0, length], dtype=torch.int32, device=bench.device)
    rows = Rows(start_R, world.rows.length_R[:1], world.rows.shared_R[:1])

    def chunk() -> None:
        bench.kernels.attend.attend_chunks(out_THD, q_THD, cache, rows, world.spec, max_queries=length)

    flops = 2.0 * length * length * shape.num_heads * shape.head_dim
    yield Launch(f"chunk attention, {length} tokens", chunk, 0.0, flops)


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
    memory = range_memory(64 * 2 * inner, bench.device)

    def multiply() -> None:
        bench.kernels.multiply.multiply(product, few, weight_NK, None, memory)

    yield Launch("product, 1 row", multiply, float(weight_NK.nbytes))
    added = SumNorm(x_TK=x[:1], more_TK=more[:1], sum_TK=total[:1], weight_K=weight, eps=1e-6)

    def multiply_norm() -> None:
        bench.kernels.multiply.multiply_norm(act[:1], added, weight_NK, None, "silu", memory)

    yield Launch("the same with add, norm and gate", multiply_norm, float(weight_NK.nbytes))
    many = _random(bench, num_rows, 2 * inner)

    def gemm() -> None:
        torch.mm(x, weight_NK.t(), out=many)

    flops = 2.0 * weight_NK.numel() * num_rows
    yield Launch(f"product (cuBLAS), {num_rows} rows", gemm, float(weight_NK.nbytes), flops)


def _sampler(bench: Bench, shape: Shape) -> Iterator[Launch]:
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

    yield Launch(f"sampler, {num_rows} rows", draw, float(logits.nbytes) + 2.0 * scratch.work.nbytes)


def _random(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device).to(bench.dtype)
