"""Launchers of the kernels in `pointwise`: one function per operation of `models.ops`, fused where a step allows it.

Buffers are rows of values, contiguous in the last dimension; they may be columns of a wider value.

Shapes: T tokens of the step, W width of a buffer, R rows of the step, B blocks per row, S slots of the cache, H heads,
J kv heads, D head size, L positions, F rotary size / 2, V rows of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_dtype, check_heads_of_rows, check_norm, check_rows
from nano_inference.executors.cuda.kernels import pointwise
from nano_inference.executors.cuda.kernels.variant import Variant, padded
from nano_inference.executors.cuda.records import NORM_ORDERS, Cache, HeadNorms, NormOrder
from nano_inference.models.ops import Activation, TablePart, TableRows

COLUMNS, HEADS = 1024, 16  # columns, and heads of a token, per program
NORM_COLUMNS = 2048  # columns of a row whose squares are added side by side
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "relu_squared")
TABLE_ROWS: tuple[TableRows, ...] = ("token", "previous", "pair")


def norm_variant(*, has_more: bool, has_weight: bool, has_offset: bool) -> Variant:
    """Return the constants of `norm`."""
    constants = {"C": NORM_COLUMNS, "HAS_MORE": has_more, "HAS_WEIGHT": has_weight, "HAS_OFFSET": has_offset}
    return Variant(constants=constants, num_warps=4, fuses=False)


def rotate_variant(
    dtype: torch.dtype, head_dim: int, order: NormOrder, *, has_rotary: bool, has_weight: bool, has_offset: bool
) -> Variant:
    """Return the constants of `rotate_and_store`, with the warps of `attend_rows`."""
    constants = {"D": head_dim, "P": padded(head_dim), "H": HEADS, "HAS_ROTARY": has_rotary}
    constants |= {"NORM": NORM_ORDERS.index(order), "HAS_WEIGHT": has_weight, "HAS_OFFSET": has_offset}
    return Variant(constants=constants, num_warps=8 if dtype == torch.float32 else 4, fuses=False)


def block_variant(**constants: int | bool) -> Variant:
    """Return the constants of a kernel on blocks of columns."""
    return Variant(constants={"C": COLUMNS, **constants}, num_warps=4, fuses=False)


def norm(
    out_TW: Tensor,
    x_TW: Tensor,
    weight_W: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    more_TW: Tensor | None = None,
    sum_TW: Tensor | None = None,
) -> None:
    """Write `models.ops.Norm` of x to out. With `more` and `sum`: write x + more to sum, and its norm to out.

    `sum` is neither x nor more; it has the strides of out.
    """
    check_norm(out_TW, x_TW, more_TW, sum_TW)
    width = x_TW.size(1)
    variant = norm_variant(has_more=more_TW is not None, has_weight=weight_W is not None, has_offset=offset != 0)
    more, total = (x_TW if one is None else one for one in (more_TW, sum_TW))
    weight = x_TW if weight_W is None else weight_W
    variant.launch(
        pointwise.norm_row,
        (x_TW.size(0),),
        *(x_TW, more, total, weight, out_TW),
        *(x_TW.stride(0), more.stride(0), out_TW.stride(0), width, eps, offset),
    )


def rotate_and_store(
    q_THD: Tensor,
    qkv_TW: Tensor,
    cos_LF: Tensor | None,
    sin_LF: Tensor | None,
    position_T: Tensor,
    row_T: Tensor,
    cache: Cache,
    norms: HeadNorms,
) -> None:
    """Write normalised and rotated queries [T, H, D], and keys and values to the cache (`HeadNorm`, `Rotate`, `Store`).

    `qkv_TW` holds the heads of queries, keys and values in this order. cos and sin have a row for each position, in the
    model's precision; None: no rotation. Tokens at negative positions are skipped. int32: `position_T`, and `row_T`,
    the row of the block table of each token.
    """
    check_heads_of_rows(q_THD, qkv_TW, cos_LF, cache)
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv = cache.k_SJD.size(1)
    rotary_dim = 0 if cos_LF is None else 2 * cos_LF.size(1)
    has_weight, has_offset = norms.q_D is not None, norms.offset != 0
    variant = rotate_variant(
        qkv_TW.dtype, head_dim, norms.order, has_rotary=rotary_dim > 0, has_weight=has_weight, has_offset=has_offset
    )
    cos, sin, q_norm, k_norm = (qkv_TW if one is None else one for one in (cos_LF, sin_LF, norms.q_D, norms.k_D))
    variant.launch(
        pointwise.rotate_heads,
        (num_tokens, -(-(num_heads + 2 * num_kv) // HEADS)),
        *(qkv_TW, q_norm, k_norm, cos, sin, position_T, row_T, cache.table_RB, q_THD, cache.k_SJD, cache.v_SJD),
        *(qkv_TW.stride(0), cache.table_RB.stride(0), num_heads, num_kv, cache.block_size),
        *(norms.eps, norms.offset, rotary_dim),
    )


def activate(out_TW: Tensor, gate_TW: Tensor, up_TW: Tensor | None, kind: Activation) -> None:
    """Write act(gate) · up, or relu(gate)² (`models.ops.Activate`)."""
    check_dtype("gate", gate_TW)
    check_rows(out=out_TW, gate=gate_TW, **({} if up_TW is None else {"up": up_TW}))
    up = gate_TW if up_TW is None else up_TW
    block_variant(KIND=ACTIVATIONS.index(kind)).launch(
        pointwise.activate_block, _grid(out_TW), gate_TW, up, out_TW, *_strides(gate_TW, up, out_TW), out_TW.size(1)
    )


def mix(out_TW: Tensor, x_TW: Tensor, y_TW: Tensor, a_1: Tensor | None, b_1: Tensor, sign: int) -> None:
    """Write a · x + sign · b · y (`models.ops.Mix`); `a_1` and `b_1` are float32 numbers on the device."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW, y=y_TW)
    block_variant(HAS_A=a_1 is not None).launch(
        pointwise.mix_block,
        _grid(out_TW),
        *(x_TW, y_TW, out_TW, b_1 if a_1 is None else a_1, b_1),
        *_strides(x_TW, y_TW, out_TW),
        *(out_TW.size(1), sign),
    )


def gate_values(v_TW: Tensor, gate_TJ: Tensor, more_TW: Tensor, head_dim: int, scale: float) -> None:
    """Add scale · sigmoid(gate) · more to v in place (`models.ops.GateValues`)."""
    check_dtype("v", v_TW)
    check_rows(v=v_TW, gate=gate_TJ, more=more_TW)
    block_variant().launch(
        pointwise.gate_values_block,
        _grid(v_TW),
        *(v_TW, gate_TJ, more_TW),
        *_strides(v_TW, gate_TJ, more_TW),
        *(v_TW.size(1), head_dim, scale),
    )


def smear(x_TW: Tensor, gate_T1: Tensor, before_TW: Tensor, share_1: Tensor, previous_T: Tensor) -> None:
    """Add share · sigmoid(gate) · before to x in place (`models.ops.Smear`); `previous_T` is int32, -1: none."""
    check_dtype("x", x_TW)
    check_rows(x=x_TW, before=before_TW)
    block_variant().launch(
        pointwise.smear_block,
        _grid(x_TW),
        *(x_TW, gate_T1, before_TW, share_1, previous_T),
        *_strides(x_TW, gate_T1, before_TW),
        x_TW.size(1),
    )


def softcap(x_TW: Tensor, cap: float) -> None:
    """Replace x by cap · tanh(x / cap) (`models.ops.Softcap`)."""
    check_dtype("x", x_TW)
    check_rows(x=x_TW)
    block_variant().launch(pointwise.softcap_block, _grid(x_TW), x_TW, x_TW.stride(0), x_TW.size(1), cap)


def embed(
    out_TW: Tensor,
    table_VW: Tensor,
    token_T: Tensor,
    previous_T: Tensor,
    rows: TableRows = "token",
    scale: float = 1.0,
    part: TablePart | None = None,
) -> None:
    """Write scaled rows of a table (`models.ops.Embed`); ids are int32, `previous_T` is -1 where there is none."""
    check_dtype("table", table_VW)
    check_rows(out=out_TW, table=table_VW)
    rounded_scale = float(torch.tensor(scale, dtype=table_VW.dtype))
    first_row, num_rows = (0, table_VW.size(0)) if part is None else (part.first_row, part.num_rows)
    block_variant(KIND=TABLE_ROWS.index(rows)).launch(
        pointwise.embed_block,
        _grid(out_TW),
        *(table_VW, token_T, previous_T, out_TW),
        *(out_TW.stride(0), out_TW.size(1), num_rows, first_row, table_VW.size(0), rounded_scale),
    )


def _grid(out_TW: Tensor) -> tuple[int, int]:
    return out_TW.size(0), -(-out_TW.size(1) // COLUMNS)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride(0) for tensor in tensors)
