"""Launchers of the matrix product with few rows.

Shapes: T tokens, N outputs, K inputs, Z ranges of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_product
from nano_inference.executors.cuda.kernels import linear
from nano_inference.executors.cuda.kernels.variant import Variant, is_interpreted
from nano_inference.executors.cuda.records import MOST_ROWS, TILE_IN, num_ranges, range_size, tile_out


def range_variant(outputs: int, num_in: int, dtype: torch.dtype) -> Variant:
    """Return the constants of the partial products, with `outputs` per program."""
    is_float32 = dtype == torch.float32
    tile_in = TILE_IN // (2 if is_float32 or num_in % TILE_IN else 1)
    constants = {"M": MOST_ROWS, "BN": outputs, "BK": tile_in, "IS_EVEN": num_in % tile_in == 0, "UPCAST": False}
    return Variant(constants=constants, num_warps=4, num_stages=3 if is_float32 else 5)


def merge_variant(*, has_bias: bool) -> Variant:
    """Return the constants of the sum of ranges."""
    return Variant(constants={"C": 256, "HAS_BIAS": has_bias}, num_warps=4, fuses=False)


def multiply(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, part_ZTN: Tensor) -> None:
    """Write x Wᵀ + bias (`models.ops.Linear`, with its matrices merged) for at most `MOST_ROWS` tokens.

    `part_ZTN` is scratch memory, float32, contiguous, with at least num_ranges(N, K) · T · N values. `x` may have more
    than K columns; the others are not read. Raises `ValueError` if there are too many tokens.
    """
    check_product(out_TN, x_TK, weight_NK, part_ZTN)
    (num_out, num_in), num_tokens = weight_NK.shape, x_TK.size(0)
    ranges = num_ranges(num_out, num_in)
    outputs = tile_out(num_out)
    variant = range_variant(outputs, num_in, x_TK.dtype)
    (variant.upcast() if is_interpreted(x_TK) else variant).launch(
        linear.multiply_range,
        (-(-num_out // outputs), ranges),
        *(x_TK, weight_NK, part_ZTN, num_tokens, num_out, num_in),
        *(x_TK.stride(0), weight_NK.stride(0), range_size(num_out, num_in)),
    )
    merged = merge_variant(has_bias=bias_N is not None)
    merged.launch(
        linear.merge_range,
        (num_tokens, -(-num_out // merged.constants["C"])),
        *(part_ZTN, out_TN if bias_N is None else bias_N, out_TN, ranges, num_out, out_TN.stride(0)),
    )
