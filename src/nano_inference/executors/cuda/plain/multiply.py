"""The launcher of `kernels.multiply` in plain torch.

Shapes: T tokens, N outputs, K inputs, Z ranges of inputs, M = `MOST_ROWS` rows of a tile.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from nano_inference.executors.cuda.checks import check_product
from nano_inference.executors.cuda.records import MOST_ROWS, num_ranges, range_size


def multiply(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, part_ZTN: Tensor) -> None:
    """Write x Wᵀ + bias for at most `MOST_ROWS` tokens: float32 products of ranges, added in ascending order.

    Rows are padded to `MOST_ROWS`, so that a row's bits do not depend on their number.
    """
    check_product(out_TN, x_TK, weight_NK, part_ZTN)
    (num_out, num_in), num_tokens = weight_NK.shape, x_TK.size(0)
    ranges, size = num_ranges(num_out, num_in), range_size(num_out, num_in)
    whole_ZTN = part_ZTN.view(-1)[: ranges * num_tokens * num_out].view(ranges, num_tokens, num_out)
    x_MK = functional.pad(x_TK[:, :num_in].float(), (0, 0, 0, MOST_ROWS - num_tokens))
    for index in range(ranges):
        first, end = index * size, min((index + 1) * size, num_in)
        whole_ZTN[index].copy_((x_MK[:, first:end] @ weight_NK[:, first:end].float().t())[:num_tokens])
    sum_TN = whole_ZTN[0]
    for index in range(1, ranges):
        sum_TN = sum_TN + whole_ZTN[index]
    out_TN.copy_(sum_TN if bias_N is None else sum_TN + bias_N.float())
