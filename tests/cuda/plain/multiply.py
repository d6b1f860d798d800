"""The launchers of `kernels.multiply` in plain torch.

Shapes: T tokens, N outputs, K inputs, M = `MOST_ROWS` rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.executors.cuda.checks import check_product
from nano_inference.executors.cuda.records import MOST_ROWS, RangeMemory, SumNorm, range_size
from nano_inference.models.ops import Activation
from tests.cuda.plain import operate


def multiply(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, memory: RangeMemory) -> None:
    """Write x Wᵀ + bias: float32 products of ranges, added in ascending order.

    Rows are padded to `MOST_ROWS`, so that a row's bits do not depend on their number.
    """
    check_product(out_TN, x_TK, weight_NK, memory)
    num_out, num_in = weight_NK.shape
    size = range_size(num_out, num_in)
    for out_MN, x_MK in zip(out_TN.split(MOST_ROWS), x_TK[:, :num_in].float().split(MOST_ROWS), strict=True):
        num_tokens = x_MK.size(0)
        x_MK = functional.pad(x_MK, (0, 0, 0, MOST_ROWS - num_tokens))
        sum_MN = torch.zeros(num_tokens, num_out, device=x_TK.device)
        for first in range(0, num_in, size):
            last = min(first + size, num_in)
            sum_MN += (x_MK[:, first:last] @ weight_NK[:, first:last].float().t())[:num_tokens]
        out_MN.copy_(sum_MN if bias_N is None else sum_MN + bias_N.float())


def multiply_norm(
    out_TN: Tensor, norm: SumNorm, weight_NK: Tensor, bias_N: Tensor | None, kind: Activation | None,
    memory: RangeMemory,
) -> None:  # fmt: skip
    """Write x + more to the sum, and the product of its norm to out, or the activation of the product."""
    x_TK = torch.empty_like(norm.sum_TK)
    operate.norm(
        x_TK, norm.x_TK, norm.weight_K, eps=norm.eps, offset=norm.offset, more_TW=norm.more_TK, sum_TW=norm.sum_TK
    )
    if kind is None:
        multiply(out_TN, x_TK, weight_NK, bias_N, memory)
        return
    whole_TN = x_TK.new_empty(x_TK.size(0), weight_NK.size(0))
    multiply(whole_TN, x_TK, weight_NK, bias_N, memory)
    width = out_TN.size(1)
    up_TN = None if kind == "relu_squared" else whole_TN[:, width:]
    operate.activate(out_TN, whole_TN[:, :width], up_TN, kind)
