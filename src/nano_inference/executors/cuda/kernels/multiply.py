"""Launchers of the matrix product: tiles chosen by the number of tokens, sums in an order that never depends on it.

Shapes: T tokens, N outputs, K inputs, Z ranges of inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_norm, check_product
from nano_inference.executors.cuda.kernels import fused, linear
from nano_inference.executors.cuda.kernels.operate import ACTIVATIONS, NORM_COLUMNS
from nano_inference.executors.cuda.kernels.variant import Variant, is_interpreted
from nano_inference.executors.cuda.records import (
    MOST_ROWS,
    MOST_SPLIT_ROWS,
    PROGRAMS,
    TILE_IN,
    TILE_OUT,
    RangeMemory,
    SumNorm,
    num_ranges,
    range_size,
)
from nano_inference.models.ops import Activation


class Tile(NamedTuple):
    """The tokens and outputs of a program, and how it is compiled."""

    rows: int
    outs: int
    num_warps: int = 4
    num_stages: int = 3


TILES = (Tile(MOST_ROWS, TILE_OUT), Tile(32, 64), Tile(64, 128, num_warps=8), Tile(128, 128, num_warps=8))
_MOST_TOGETHER = 32
"""Rows of one matrix instruction's operands: of 64, Triton multiplies with another instruction (`wgmma`)."""


def range_variant(
    num_in: int, dtype: torch.dtype, tile: Tile = TILES[0], *, is_split: bool, is_summed: bool = False, has_bias: bool
) -> Variant:
    """Return the constants of a product."""
    is_float32 = dtype == torch.float32
    tile_in = TILE_IN // (2 if is_float32 or num_in % TILE_IN else 1)
    rows = min(tile.rows, _MOST_TOGETHER)
    constants = {"M": rows, "PARTS": tile.rows // rows, "BN": tile.outs, "BK": tile_in, "UPCAST": False}
    constants |= {"IS_EVEN": num_in % tile_in == 0, "IS_SPLIT": is_split, "IS_SUMMED": is_summed, "HAS_BIAS": has_bias}
    return Variant(constants=constants, num_warps=tile.num_warps, num_stages=tile.num_stages, fuses=False)


def norm_variant(
    num_in: int, dtype: torch.dtype, kind: Activation | None, *, is_split: bool, has_bias: bool, has_offset: bool
) -> Variant:
    """Return the constants of `multiply_norm`: those of the smallest tile of `multiply` and of the norm of a row."""
    found = range_variant(num_in, dtype, is_split=is_split, has_bias=has_bias)
    constants = {name: found.constants[name] for name in ("M", "BN", "BK", "IS_EVEN", "IS_SPLIT", "HAS_BIAS", "UPCAST")}
    constants |= {"C": NORM_COLUMNS, "HAS_OFFSET": has_offset, "KIND": (*ACTIVATIONS, None).index(kind)}
    return replace(found, constants=constants)


def tiles_for(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles that a product may have."""
    return TILES[:1] if dtype == torch.float32 else TILES


def tile_for(num_tokens: int, num_out: int, num_ranges: int, dtype: torch.dtype) -> Tile:
    """Return the largest tile that is not half empty and makes enough programs, else a small one."""
    fitting = [tile for tile in tiles_for(dtype) if num_tokens > tile.rows // 2] or list(TILES[:1])
    enough = [tile for tile in fitting if _programs(tile, num_tokens, num_out) * num_ranges >= PROGRAMS]
    return (enough or fitting[:2])[-1]


def multiply(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, memory: RangeMemory) -> None:
    """Write x Wᵀ + bias (`models.ops.Linear`, with its matrices merged).

    `x` may have more than K columns; the others are not read. Ranges are computed side by side where the tiles alone
    are too few programs, else one after the other.
    """
    check_product(out_TN, x_TK, weight_NK, memory)
    num_tokens, (num_out, num_in) = x_TK.size(0), weight_NK.shape
    ranges = num_ranges(num_out, num_in)
    tile = tile_for(num_tokens, num_out, ranges, x_TK.dtype)
    is_few = num_tokens <= MOST_SPLIT_ROWS and _programs(tile, num_tokens, num_out) < PROGRAMS
    launch(out_TN, x_TK, weight_NK, bias_N, memory, tile, is_split=ranges > 1 and is_few)


def multiply_norm(
    out_TN: Tensor, norm: SumNorm, weight_NK: Tensor, bias_N: Tensor | None, kind: Activation | None,
    memory: RangeMemory,
) -> None:  # fmt: skip
    """Write x + more to the sum, and norm(sum) Wᵀ + bias to out, or with `kind` its activation, of up to 16 rows.

    Computes `operate.norm`, `multiply` and `operate.activate`. A gated activation takes the first half of the outputs
    as the gate and the others as up; there is no bias with an activation.
    """
    check_product(out_TN, norm.x_TK, weight_NK, memory)
    check_norm(norm.sum_TK, norm.x_TK, norm.more_TK, norm.sum_TK)
    num_tokens, (num_out, num_in) = norm.x_TK.size(0), weight_NK.shape
    if num_tokens > MOST_ROWS or (kind is not None and bias_N is not None):
        raise ValueError(f"multiply_norm supports up to {MOST_ROWS} rows, and no bias before an activation")
    ranges, is_biased = num_ranges(num_out, num_in), bias_N is not None
    variant = norm_variant(
        num_in, norm.x_TK.dtype, kind, is_split=ranges > 1, has_bias=is_biased, has_offset=norm.offset != 0
    )
    (variant.upcast() if is_interpreted(out_TN) else variant).launch(
        fused.multiply_norm,
        (-(-num_out // TILE_OUT), ranges),
        *(norm.x_TK, norm.more_TK, norm.sum_TK, norm.weight_K, weight_NK, out_TN if bias_N is None else bias_N),
        *(*memory, out_TN, num_tokens, num_out, num_in),
        *(one.stride(0) for one in (norm.x_TK, norm.more_TK, norm.sum_TK, weight_NK, out_TN)),
        *(range_size(num_out, num_in), norm.eps, norm.offset),
    )


def launch(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, memory: RangeMemory, tile: Tile, *,
    is_split: bool,
) -> None:  # fmt: skip
    """Write x Wᵀ + bias with one of the tiles of `tiles_for`. The bits are the same for all of them."""
    num_tokens, (num_out, num_in) = x_TK.size(0), weight_NK.shape
    ranges = num_ranges(num_out, num_in)
    is_summed = ranges > 1 and not is_split
    has_bias = bias_N is not None
    variant = range_variant(num_in, x_TK.dtype, tile, is_split=is_split, is_summed=is_summed, has_bias=has_bias)
    (variant.upcast() if is_interpreted(x_TK) else variant).launch(
        linear.multiply_range,
        (-(-num_tokens // tile.rows), -(-num_out // tile.outs), ranges if is_split else 1),
        *(x_TK, weight_NK, out_TN if bias_N is None else bias_N, *memory, out_TN, num_tokens, num_out, num_in),
        *(x_TK.stride(0), weight_NK.stride(0), out_TN.stride(0), range_size(num_out, num_in)),
    )


def _programs(tile: Tile, num_tokens: int, num_out: int) -> int:
    return -(-num_tokens // tile.rows) * -(-num_out // tile.outs)
