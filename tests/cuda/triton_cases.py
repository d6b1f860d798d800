"""Cases that only Triton kernels have.

Shapes: B rows, C rows of a block, T tokens, N outputs and K inputs of a product, R some of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from nano_inference.executors.cuda import records
from nano_inference.executors.cuda.kernels import attend
from nano_inference.executors.cuda.kernels.multiply import Tile, launch, tiles_for
from nano_inference.executors.cuda.kernels.sampler import uniform_of
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.records import num_ranges, num_sums, range_memory
from nano_inference.executors.torch.attention.context import AttentionSpec
from tests.cuda.attention_cases import World, grouped, split
from tests.cuda.case import Case
from tests.cuda.linear_cases import operands
from tests.cuda.sampler_cases import uniform_arguments, uniforms_differ


@triton.jit
def _uniforms(seed_B: tl.tensor, sample_B: tl.tensor, position_B: tl.tensor, out_B: tl.tensor, C: tl.constexpr) -> None:
    at_C = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(out_B + at_C, uniform_of(tl.load(seed_B + at_C), tl.load(sample_B + at_C), tl.load(position_B + at_C)))


def uniform_error(kernels: Kernels, device: torch.device) -> float:
    """Return the number of uniforms whose bits differ from `sampling.uniform`."""
    del kernels
    out_B = torch.empty(512, dtype=torch.float64, device=device)
    _uniforms[(4,)](*(one.to(device) for one in uniform_arguments()), out_B, C=128)
    return uniforms_differ(out_B)


def tile_dependence(device: torch.device, num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype) -> float:
    """Return how many tiles and orders of ranges change a bit of some rows of a product from what they are alone."""
    x_TK, weight_NK, bias_N = (one.to(device) for one in operands(num_tokens, num_out, num_in, dtype))
    ranges = num_ranges(num_out, num_in)
    memory = range_memory(num_sums(num_tokens, num_out, num_in), device)

    def found(x_TK: torch.Tensor, tile: Tile, is_split: bool) -> torch.Tensor:
        out_TN = torch.full((x_TK.size(0), num_out), torch.nan, device=device)  # float32: no bit is rounded away
        launch(out_TN, x_TK, weight_NK, bias_N, memory, tile, is_split=is_split)
        return out_TN

    smallest, *others = tiles_for(dtype)
    rows = [0, num_tokens // 2, num_tokens - 1]
    right_RN = torch.cat([found(x_TK[row : row + 1], smallest, ranges > 1) for row in rows])
    choices = [(tile, is_split) for tile in (smallest, *others) for is_split in {False, ranges > 1}]
    return float(sum(not torch.equal(found(x_TK, *one)[rows], right_RN) for one in choices))


def row_dependence(kernels: Kernels, device: torch.device, world: World) -> float:
    """Return how many ways to attend change a bit of a token: alone or among a row's tokens, in each size of tile."""
    together = split(kernels, world, device)
    alone, begin = [], 0
    for row, (count, keys) in enumerate(world.rows):
        for index in range(count):
            one = replace(world, rows=[(1, keys - count + index + 1)])
            object.__setattr__(one, "q_THD", world.q_THD[begin + index : begin + index + 1])
            object.__setattr__(one, "cache", world.cache._replace(table_RB=world.cache.table_RB[row : row + 1]))
            alone.append(one)
        begin += count
    found = [torch.cat([split(kernels, one, device, most_queries=most) for one in alone]) for most in (1, 17)]
    if all(count == 1 for count, _ in world.rows):
        with patch.object(attend, "_GROUP_PROGRAMS", 3):  # each computes several splits
            found.append(grouped(kernels, world, device))
        for size in (16, 32, 64, 128):
            with patch.object(records, "GROUP_ROWS", size):
                found.append(grouped(kernels, world, device))
    return float(sum(not torch.equal(one, together) for one in found))


def cases() -> Iterator[Case]:
    """Yield every case."""
    yield Case("sampler-uniform-bits", uniform_error, 0.0)
    for dtype, (num_out, num_in) in product((torch.bfloat16, torch.float32), ((70, 1200), (33, 100))):
        name = f"linear-tiles-{num_out}-{num_in}-{str(dtype)[6:]}"
        yield Case(name, lambda k, d, s=(67, num_out, num_in, dtype): tile_dependence(d, *s), 0.0)
    both = AttentionSpec(0.2, 290, 1.5)
    worlds = {
        "pieces": World(rows=[(5, 270), (1, 40), (3, 3)], ratio=7, head_dim=64, dtype=torch.bfloat16),
        "pieces-both": World(rows=[(9, 301), (1, 2)], ratio=3, head_dim=256, dtype=torch.bfloat16, spec=both),
        "pieces-float32": World(rows=[(5, 270), (2, 40)], ratio=4, head_dim=64),
        "group": World(
            rows=[(1, keys) for keys in (300, 517, 320, 299, 290, 512)],
            ratio=7,
            head_dim=64,
            dtype=torch.bfloat16,
            shared=288,
        ),
        "group-both": World(rows=[(1, 300), (1, 517), (1, 9), (1, 299)], ratio=2, head_dim=64, spec=both, shared=288),
    }
    for name, world in worlds.items():
        yield Case(f"attention-tiles-{name}", lambda k, d, w=world: row_dependence(k, d, w), 0.0)
