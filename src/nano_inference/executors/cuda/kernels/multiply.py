"""Launchers of the matrix product with few rows.

Shapes: T tokens, N outputs, K inputs, Z ranges of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.kernels import linear
from nano_inference.executors.cuda.kernels.variant import Variant, check_dtype, check_rows, is_interpreted

MOST_TOKENS = 16
_TILE_IN = 128
_PROGRAMS = 264
"""Programs to aim at: two for each of a Hopper GPU's 132 multiprocessors."""
_FEWEST_IN = 256


def tile_out(num_out: int) -> int:
    """Return the outputs of a program."""
    return 32 if num_out >= 4096 else 16


def range_size(num_out: int, num_in: int) -> int:
    """Return how many inputs each range has. It depends on the matrix only, never on the number of rows."""
    programs = -(-num_out // tile_out(num_out))
    size = num_in
    while size > _FEWEST_IN and programs * -(-num_in // size) < _PROGRAMS:
        size = -(-size // 2 // _TILE_IN) * _TILE_IN
    return size


def num_ranges(num_out: int, num_in: int) -> int:
    """Return the number of ranges Z."""
    return -(-num_in // range_size(num_out, num_in))


def range_variant(outputs: int, num_in: int, dtype: torch.dtype) -> Variant:
    """Return the constants of the partial products, with `outputs` per program."""
    is_float32 = dtype == torch.float32
    tile_in = _TILE_IN // (2 if is_float32 or num_in % _TILE_IN else 1)
    constants = {"M": MOST_TOKENS, "BN": outputs, "BK": tile_in, "IS_EVEN": num_in % tile_in == 0, "UPCAST": False}
    return Variant(constants=constants, num_warps=4, num_stages=3 if is_float32 else 5)


def merge_variant(*, has_bias: bool) -> Variant:
    """Return the constants of the sum of ranges."""
    return Variant(constants={"C": 256, "HAS_BIAS": has_bias}, num_warps=4, fuses=False)


def multiply(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, part_ZTN: Tensor) -> None:
    """Write x Wᵀ + bias (`models.ops.Linear`, with its matrices merged) for at most `MOST_TOKENS` tokens.

    `part_ZTN` is scratch memory, float32, contiguous, with at least num_ranges(N, K) · T · N values. `x` may have more
    than K columns; the others are not read. Raises `ValueError` if there are too many tokens.
    """
    check_dtype("x", x_TK)
    check_rows(out=out_TN, x=x_TK, weight=weight_NK)
    (num_out, num_in), num_tokens = weight_NK.shape, x_TK.size(0)
    if num_tokens > MOST_TOKENS:
        raise ValueError(f"multiply supports {MOST_TOKENS} tokens, got {num_tokens}: use a matrix product")
    ranges = num_ranges(num_out, num_in)
    if part_ZTN.numel() < ranges * num_tokens * num_out:
        raise ValueError(f"part_ZTN must have {ranges * num_tokens * num_out} values, got {part_ZTN.numel()}")
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
        *(part_ZTN, part_ZTN if bias_N is None else bias_N, out_TN, ranges, num_out, out_TN.stride(0)),
    )
