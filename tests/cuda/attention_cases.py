"""Attention kernels against float64: ragged rows, blocks out of order, NaN in every slot that no query may read.

Shapes: T tokens of the step, R rows, H heads, J kv heads, D head size, S slots, B blocks per row, K keys of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.records import SPLIT, Cache, Groups, Partials, Rows, group_rows, num_splits
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.executors.torch.attention.masks import create_attention_mask
from tests.cuda.case import Case, error

_KV_HEADS, _BLOCK_SIZE = 2, 16


@dataclass(frozen=True, kw_only=True)
class World:
    """Rows of (tokens in the step, keys) with random queries, keys and values."""

    rows: Sequence[tuple[int, int]]
    ratio: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    spec: AttentionSpec = AttentionSpec(0.3)
    shared: int = 0
    """Positions that all rows have in common."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        num_tokens, width = sum(count for count, _ in self.rows), _KV_HEADS * self.ratio * self.head_dim
        x_TW = torch.randn(num_tokens, width + 16, generator=generator).to(self.dtype)
        put = object.__setattr__
        put(self, "q_THD", x_TW[:, :width].unflatten(1, (-1, self.head_dim)))
        num_blocks = [-(-keys // _BLOCK_SIZE) for _, keys in self.rows]
        free = (torch.randperm(sum(num_blocks) + 1, generator=generator) + 1).tolist()
        table_RB = torch.full((len(self.rows), max(num_blocks) + 1), -1, dtype=torch.int32)
        table_RB[:, ::2] = 1 << 30
        slots = (sum(num_blocks) + 2) * _BLOCK_SIZE
        k_SJD, v_SJD = (torch.full((slots, _KV_HEADS, self.head_dim), torch.nan, dtype=self.dtype) for _ in "kv")
        for row, (count, keys) in enumerate(self.rows):
            first = 0 if self.spec.window is None else max(0, keys - count + 1 - self.spec.window)
            for block in range(first // _BLOCK_SIZE, num_blocks[row]):
                is_shared = row > 0 and (block + 1) * _BLOCK_SIZE <= self.shared
                table_RB[row, block] = table_RB[0, block] if is_shared else free.pop()
            at_K = slots_of(table_RB[row], first, keys)
            for x_SJD in (k_SJD, v_SJD):
                is_new_K = x_SJD[at_K].isnan().all(-1).all(-1)
                fresh_KJD = torch.randn(int(is_new_K.sum()), _KV_HEADS, self.head_dim, generator=generator)
                x_SJD[at_K[is_new_K]] = fresh_KJD.to(self.dtype)
        put(self, "cache", Cache(k_SJD, v_SJD, table_RB, _BLOCK_SIZE))

    q_THD: Tensor = None  # type: ignore[assignment]
    cache: Cache = None  # type: ignore[assignment]

    def expected(self) -> Tensor:
        """Return the outputs in float64."""
        outputs = []
        offset = 0
        for row, (count, keys) in enumerate(self.rows):
            first = 0 if self.spec.window is None else max(0, keys - count + 1 - self.spec.window)
            at_K = slots_of(self.cache.table_RB[row], first, keys)
            k_KHD, v_KHD = (
                x_SJD[at_K].double().repeat_interleave(self.ratio, 1) for x_SJD in (self.cache.k_SJD, self.cache.v_SJD)
            )
            q_QHD = self.q_THD[offset : offset + count].double()
            score_HQK = torch.einsum("qhd,khd->hqk", q_QHD, k_KHD) * self.spec.scale
            if self.spec.softcap is not None:
                score_HQK = torch.tanh(score_HQK / self.spec.softcap) * self.spec.softcap
            mask_QK = create_attention_mask(
                torch.arange(keys - count, keys), torch.arange(first, keys), self.spec.window
            )
            weight_HQK = score_HQK.masked_fill(~mask_QK, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weight_HQK, v_KHD))
            offset += count
        return torch.cat(outputs)

    def on(self, device: torch.device) -> tuple[Tensor, Cache, Rows, Tensor]:
        """Return queries, cache, rows and positions on a device."""
        starts = [0]
        positions: list[int] = []
        for count, keys in self.rows:
            starts.append(starts[-1] + count)
            positions += range(keys - count, keys)
        whole = [torch.tensor(x, dtype=torch.int32) for x in (starts, [keys for _, keys in self.rows], positions)]
        start_R, length_R, position_T = (x.to(device) for x in whole)
        k, v, table, size = self.cache
        wide = self.q_THD.new_zeros(self.q_THD.size(0), self.q_THD.stride(0))
        wide[:, : self.q_THD[0].numel()] = self.q_THD.flatten(1)
        q_THD = wide.to(device)[:, : self.q_THD[0].numel()].unflatten(1, (-1, self.head_dim))
        return (
            q_THD,
            Cache(k.to(device), v.to(device), table.to(device), size),
            Rows(start_R, length_R, torch.zeros_like(length_R)),
            position_T,
        )


def slots_of(table_B: Tensor, first: int, end: int) -> Tensor:
    """Return the cache slots of positions [first, end) of a row."""
    position_K = torch.arange(first, end)
    return table_B[position_K // _BLOCK_SIZE].long() * _BLOCK_SIZE + position_K % _BLOCK_SIZE


def split(
    kernels: Kernels, world: World, device: torch.device, groups: Groups | None = None, most_queries: int = 0
) -> Tensor:
    """Return the outputs by split decode. `most_queries` makes tiles larger than the rows need."""
    q_THD, cache, rows, position_T = world.on(device)
    splits = num_splits(max(keys for _, keys in world.rows)) + 1
    num_tokens, num_heads, head_dim = q_THD.shape
    part_THND = torch.full((num_tokens, num_heads, splits, head_dim), torch.nan, device=device)
    partials = Partials(part_THND, part_THND[..., 0].clone())
    if groups is None:
        max_queries = most_queries or max(count for count, _ in world.rows)
        kernels.attend.attend_splits(partials, q_THD, cache, rows, world.spec, max_queries=max_queries)
    else:
        in_group = groups.row_QX[groups.row_QX >= 0].long()
        rows.shared_R[in_group] = groups.shared_Q[0]
        kernels.attend.attend_groups(partials, q_THD, cache, rows, groups, world.spec)
    out_THD = torch.full(q_THD.shape, torch.nan, dtype=q_THD.dtype, device=device)
    kernels.attend.merge_splits(out_THD, partials, position_T, world.spec.window)
    return out_THD


def chunk(kernels: Kernels, world: World, device: torch.device) -> Tensor:
    """Return the outputs by one pass."""
    q_THD, cache, rows, _ = world.on(device)
    out_THD = torch.full(q_THD.shape, torch.nan, dtype=q_THD.dtype, device=device)
    max_queries = max(count for count, _ in world.rows)
    kernels.attend.attend_chunks(out_THD, q_THD, cache, rows, world.spec, max_queries=max_queries)
    return out_THD


def grouped(kernels: Kernels, world: World, device: torch.device) -> Tensor:
    """Return the outputs by split decode with one group of all rows but the third, and tiles that are not used."""
    width, num_rows = group_rows(world.ratio, world.dtype, world.head_dim), len(world.rows)
    shared = world.shared // SPLIT * SPLIT
    num_tiles = -(-num_rows // width) + 2
    row_QX = torch.full((num_tiles * width,), -1, dtype=torch.int32)
    members = [row for row in reversed(range(num_rows)) if row != 2]
    row_QX[: len(members)] = torch.tensor(members, dtype=torch.int32)
    shared_Q = torch.zeros(num_tiles, dtype=torch.int32, device=device)
    shared_Q[: -(-len(members) // width)] = shared
    return split(kernels, world, device, Groups(row_QX.view(num_tiles, width).to(device), shared_Q))


def batch_dependence(kernels: Kernels, world: World, device: torch.device) -> float:
    """Return 0 if each row's bits are the same alone and in the batch, on a GPU also in a group; else 1."""
    together = split(kernels, world, device)
    in_group = together
    if device.type == "cuda":  # numpy's products depend on the shape
        in_group = grouped(kernels, world, device)
    alone = []
    for row, one in enumerate(world.rows):
        part = World(rows=[one], ratio=world.ratio, head_dim=world.head_dim, dtype=world.dtype, spec=world.spec)
        table_RB = world.cache.table_RB[row : row + 1]
        object.__setattr__(part, "cache", world.cache._replace(table_RB=table_RB))
        object.__setattr__(part, "q_THD", world.q_THD[row : row + 1])
        alone.append(split(kernels, part, device))
    return float(not (torch.equal(together, torch.cat(alone)) and torch.equal(together, in_group)))


def cases() -> Iterator[Case]:
    """Yield every case; each returns the largest difference from float64."""
    window, cap, both = AttentionSpec(0.3, 21), AttentionSpec(0.3, None, 2.0), AttentionSpec(0.2, 37, 1.5)
    decode = [(1, 1), (1, 300), (1, 16), (1, 77)]
    short, middle = [(8, 9), (3, 270), (1, 40), (2, 2)], [(4, 5), (5, 270), (6, 40), (7, 7)]
    worlds = {
        "decode-ratio7": World(rows=decode, ratio=7, head_dim=64),
        "decode-ratio1-dim80-window": World(rows=[(1, 1), (1, 560), (1, 16)], ratio=1, head_dim=80, spec=window),
        "decode-ratio3-dim96-cap": World(rows=decode, ratio=3, head_dim=96, spec=cap),
        "decode-ratio8-dim128-half": World(rows=decode, ratio=8, head_dim=128, dtype=torch.float16),
        "decode-ratio2-dim256-both": World(rows=decode, ratio=2, head_dim=256, spec=both),
        "queries8-ratio6": World(rows=short, ratio=6, head_dim=64),
        "queries7-ratio4-both": World(rows=middle, ratio=4, head_dim=64, spec=both),
        "decode-ratio7-bfloat16": World(rows=decode, ratio=7, head_dim=64, dtype=torch.bfloat16),
        "decode-ratio2-dim128-both-bfloat16": World(
            rows=decode, ratio=2, head_dim=128, dtype=torch.bfloat16, spec=both
        ),
        "queries8-ratio4-dim256-bfloat16": World(rows=short, ratio=4, head_dim=256, dtype=torch.bfloat16),
    }
    for name, world in worlds.items():
        yield compared(name, split, world)
    chunks = [(70, 70), (9, 300), (1, 5), (16, 90)]
    for name, spec, ratio, dtype in (
        ("ratio7", AttentionSpec(0.3), 7, torch.float32),
        ("ratio3-both", both, 3, torch.float32),
        ("ratio1-window-half", window, 1, torch.float16),
        ("ratio7-bfloat16", AttentionSpec(0.3), 7, torch.bfloat16),
        ("ratio4-both-bfloat16", both, 4, torch.bfloat16),
    ):
        world = World(rows=chunks, ratio=ratio, head_dim=64, dtype=dtype, spec=spec)
        yield compared(f"chunk-{name}", chunk, world)
    members = [(1, 300), (1, 517), (1, 320), (1, 299)]
    for name, spec, dtype in (
        ("bfloat16", AttentionSpec(0.3), torch.bfloat16),
        ("plain", AttentionSpec(0.3), torch.float32),
        ("both", AttentionSpec(0.2, 290, 1.5), torch.float32),
    ):
        world = World(rows=members, ratio=7, head_dim=64, dtype=dtype, spec=spec, shared=288)
        yield compared(f"group-{name}", grouped, world)
        if name != "plain":
            yield Case(
                f"attention-batch-dependence-{name}",
                lambda k, d, w=world: batch_dependence(k, w, d),
                0.0,
                dtype == torch.bfloat16,
            )


BOUNDS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest allowed differences."""


def compared(name: str, outputs: Callable[[Kernels, World, torch.device], Tensor], world: World) -> Case:
    """Return the comparison of a world's outputs with float64."""

    def run(kernels: Kernels, device: torch.device) -> float:
        return error(outputs(kernels, world, device), world.expected())

    return Case(f"attention-{name}", run, BOUNDS[world.dtype], needs_gpu=world.dtype == torch.bfloat16)
