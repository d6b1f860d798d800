"""Launchers of the matrix product with few rows.

Shapes: T tokens, N outputs, K inputs, Z ranges of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_product
from nano_inference.executors.cuda.kernels import linear
from nano_inference.executors.cuda.kernels.variant import Variant, is_interpreted
from nano_inference.executors.cuda.records import MOST_ROWS, TILE_IN, TILE_OUT, RangeMemory, num_ranges, range_size


def range_variant(num_in: int, dtype: torch.dtype, *, is_split: bool, has_bias: bool) -> Variant:
    """Return the constants of a product."""
    is_float32 = dtype == torch.float32
    tile_in = TILE_IN // (2 if is_float32 or num_in % TILE_IN else 1)
    constants = {"M": MOST_ROWS, "BN": TILE_OUT, "BK": tile_in, "IS_EVEN": num_in % tile_in == 0, "UPCAST": False}
    constants |= {"IS_SPLIT": is_split, "HAS_BIAS": has_bias}
    return Variant(constants=constants, num_warps=4, num_stages=3)


def multiply(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, memory: RangeMemory) -> None:
    """Write x Wᵀ + bias (`models.ops.Linear`, with its matrices merged) for at most `MOST_ROWS` tokens.

    `x` may have more than K columns; the others are not read. Raises `ValueError` if there are too many tokens.
    """
    check_product(out_TN, x_TK, weight_NK, memory)
    (num_out, num_in), num_tokens = weight_NK.shape, x_TK.size(0)
    ranges = num_ranges(num_out, num_in)
    variant = range_variant(num_in, x_TK.dtype, is_split=ranges > 1, has_bias=bias_N is not None)
    (variant.upcast() if is_interpreted(x_TK) else variant).launch(
        linear.multiply_range,
        (-(-num_out // TILE_OUT), ranges),
        *(x_TK, weight_NK, out_TN if bias_N is None else bias_N, *memory, out_TN, num_tokens, num_out, num_in),
        *(x_TK.stride(0), weight_NK.stride(0), out_TN.stride(0), range_size(num_out, num_in)),
    )
