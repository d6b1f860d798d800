"""Arguments that the CUDA kernels and their plain counterparts share: attention, states, head norms, products.

Shapes: T tokens of the step, R rows, H heads, J kv heads, D head size, S slots of the cache, B blocks per row,
N splits, P parts of rows, Q tiles of rows that share a prefix, X rows per tile, W width of a buffer, K inputs of a
product, L positions, F rotary size / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

SPLIT = 256  # positions per split; a multiple of every tile
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
NO_WINDOW = 1 << 30
GROUP_ROWS = 64  # most rows of a group's tile: rows of the step times query heads per kv head
MOST_ROWS = 16  # most tokens that `multiply` computes where cuBLAS may compute more
FUSED_ROWS = 4  # most tokens whose norms, rotations and activations are computed by products and attention
MOST_SPLIT_ROWS = 256  # most tokens of a product whose ranges are computed by different programs
TILE_OUT, TILE_IN = 32, 128  # outputs and inputs of a tile of `MOST_ROWS` tokens
PROGRAMS = 264  # programs to aim at: two for each of a Hopper GPU's 132 multiprocessors
_FEWEST_IN = 256


class Cache(NamedTuple):
    """One layer's cache and the rows' block tables."""

    k_SJD: Tensor
    v_SJD: Tensor
    table_RB: Tensor  # int32; only entries of blocks that a row reads need to be valid
    block_size: int


class Rows(NamedTuple):
    """The rows of a step; int32 tensors."""

    start_R: Tensor  # index of each row's first token, [R + 1]; the last entry is T
    length_R: Tensor  # keys of each row, those of the step included; 0 makes a row do nothing
    shared_R: Tensor  # positions that tiles of `Groups` compute, a multiple of `SPLIT`; 0 for rows in no group


class States(NamedTuple):
    """The slots of recurrent states that rows use (`core.step.RowState`); int32. A row is computed in parts."""

    part_R: Tensor  # each row's first part, [R + 1]; the last entry is P
    bound_P: Tensor  # each part's first token, [P + 1]; the last entry is T
    slot_P: Tensor  # receives the state after each part; -1: none
    source_R: Tensor  # holds the state before the row's first token; not read at position 0


class Groups(NamedTuple):
    """Decode rows that share a prefix, in tiles of `group_rows` rows; int32 tensors."""

    row_QX: Tensor  # row indices, -1 for unused places; the first of a tile is used
    shared_Q: Tensor  # `Rows.shared_R` of the tile's rows, whose block tables are the same up to there


class Partials(NamedTuple):
    """Results of the splits: float32, uninitialised. N is at least the longest row's `num_splits`."""

    part_THND: Tensor
    score_THN: Tensor


class LowRankStack(NamedTuple):
    """The adapters of a projection, each at a place x, with matrices m of their own ranks, and scratch memory."""

    a_XMRK: Tensor
    b_XNR: Tensor
    rank_XM: Tensor  # int32; 0: the adapter does not have this matrix
    scale_XM: Tensor  # float32
    start_M: Tensor  # each matrix's first output, int32 [M + 1]; the last entry is N
    widest: int  # outputs of a matrix
    low_TMR: Tensor  # scratch memory, float32, for the tokens of any step


class RangeMemory(NamedTuple):
    """Scratch memory of `multiply`, for the sums of ranges."""

    part_ZTN: Tensor
    """float32, contiguous: at least `num_sums` values, whatever they are."""
    done_I: Tensor  # int32, one for each tile of tokens and outputs: zeros before and after each product


def range_memory(num_values: int, device: torch.device) -> RangeMemory:
    """Allocate memory for products that need `num_values` sums. With `PROGRAMS` tiles one range is enough."""
    num_tiles = PROGRAMS * (MOST_SPLIT_ROWS // MOST_ROWS)
    return RangeMemory(torch.zeros(num_values, device=device), torch.zeros(num_tiles, dtype=torch.int32, device=device))


def num_splits(length: int) -> int:
    """Return the number of splits of a row with `length` keys."""
    return -(-length // SPLIT)


def group_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Return the rows of a group's tile: larger heads need more registers for each row."""
    return GROUP_ROWS if dtype != torch.float32 and head_dim <= 64 else min(GROUP_ROWS, 32)


def group_rows(ratio: int, dtype: torch.dtype, head_dim: int) -> int:
    """Return how many rows of the step one tile of a group holds, with `ratio` query heads per kv head."""
    return group_tile(dtype, head_dim) // ratio


NormOrder = Literal["none", "first", "last"]
NORM_ORDERS: tuple[NormOrder, ...] = ("none", "first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms of query and key heads (`models.ops.HeadNorm`): before or after the rotation, or none."""

    order: NormOrder = "none"
    eps: float = 0.0
    offset: float = 0.0
    q_D: Tensor | None = None  # weights of queries and keys: both or neither
    k_D: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHeads:
    """Queries, keys and values of a step before their norms and rotation."""

    qkv_TW: Tensor  # heads of queries, keys and values, in this order
    cos_LF: Tensor  # a row for each position, in the model's precision
    sin_LF: Tensor
    norms: HeadNorms


@dataclass(frozen=True, slots=True, kw_only=True)
class SumNorm:
    """The norm of x + more (`models.ops.Add` and `Norm`), and where the sum is written: neither x nor more."""

    x_TK: Tensor
    more_TK: Tensor
    sum_TK: Tensor
    weight_K: Tensor
    eps: float
    offset: float = 0.0


def range_size(num_out: int, num_in: int) -> int:
    """Return how many inputs each range has.

    It depends on the matrix only: the ranges and `TILE_IN` are the order of the sums, which rows must not change.
    """
    programs = -(-num_out // TILE_OUT)
    size = num_in
    while size > _FEWEST_IN and programs * -(-num_in // size) < PROGRAMS:
        size = -(-size // 2 // TILE_IN) * TILE_IN
    return size


def num_ranges(num_out: int, num_in: int) -> int:
    """Return the number of ranges Z."""
    return -(-num_in // range_size(num_out, num_in))


def num_sums(num_tokens: int, num_out: int, num_in: int) -> int:
    """Return how many sums of ranges a product may store."""
    ranges = num_ranges(num_out, num_in)
    return ranges * num_tokens * num_out if ranges > 1 and num_tokens <= MOST_SPLIT_ROWS else 0
