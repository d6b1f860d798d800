"""The launcher of `kernels.multiply` in plain torch.

Shapes: T tokens, N outputs, K inputs, M = `MOST_ROWS` rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.executors.cuda.checks import check_product
from nano_inference.executors.cuda.records import MOST_ROWS, RangeMemory, range_size


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
