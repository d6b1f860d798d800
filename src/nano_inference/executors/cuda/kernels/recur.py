"""Launchers of the kernels in `delta`: operations with a recurrent state of each row, and those of their layers.

Shapes: T tokens of the step, C channels, K taps, J = K - 1, Z slots, H value heads, X key size, V value size, W width
of a buffer.
"""

from __future__ import annotations

from torch import Tensor

from nano_inference.executors.cuda.checks import check_convolution, check_delta, check_dtype, check_rows
from nano_inference.executors.cuda.kernels import delta
from nano_inference.executors.cuda.kernels.operate import COLUMNS, block_variant
from nano_inference.executors.cuda.kernels.variant import Variant, padded
from nano_inference.executors.cuda.records import States

_STATE_VALUES = 1024  # of a head, at most, per program of one warp: its sums need no other warp
_STATE_COLUMNS = 8


def convolve_variant(taps: int, most_tokens: int) -> Variant:
    """Return the constants of `convolve`."""
    tokens, channels = (1, 256) if most_tokens == 1 else (32, 64)
    return Variant(constants={"K": taps, "M": tokens, "B": channels}, num_warps=4, fuses=False)


def delta_variant(k_dim: int, *, is_tiled: bool) -> Variant:
    """Return the constants of `gated_delta`."""
    size = padded(k_dim)
    constants = {"X": k_dim, "N": size, "B": min(_STATE_COLUMNS, _STATE_VALUES // size), "IS_TILED": is_tiled}
    return Variant(constants=constants, num_warps=1)


def gated_norm_variant(head_dim: int) -> Variant:
    """Return the constants of `gated_norm`."""
    size = padded(head_dim)
    return Variant(constants={"H": max(1, COLUMNS // size), "N": size}, num_warps=4, fuses=False)


def convolve(
    out_TC: Tensor,
    x_TC: Tensor,
    weight_C1K: Tensor,
    state_ZJC: Tensor,
    states: States,
    position_T: Tensor,
    *,
    most_tokens: int,
) -> None:
    """Write `models.ops.Convolve`, and the states after each part; rows at negative positions are skipped.

    `most_tokens` is at least the longest row's number of tokens.
    """
    check_convolution(out_TC, x_TC, weight_C1K, state_ZJC)
    channels, _, taps = weight_C1K.shape
    variant = convolve_variant(taps, most_tokens)
    variant.launch(
        delta.convolve_row,
        (-(-channels // variant.constants["B"]), states.source_R.size(0)),
        *(x_TC, weight_C1K, out_TC, state_ZJC, *states, position_T),
        *(x_TC.stride(0), out_TC.stride(0), state_ZJC.stride(0), channels),
    )


def gated_delta(
    out_TW: Tensor,
    qkv_TW: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    state_ZHXV: Tensor,
    states: States,
    position_T: Tensor,
    *,
    is_tiled: bool,
) -> None:
    """Write `models.ops.GatedDelta`, and the states after each part; rows at negative positions are skipped.

    `qkv_TW` holds the heads of queries, keys and values in this order.
    """
    num_keys = check_delta(out_TW, qkv_TW, a_TH, b_TH, state_ZHXV)
    _, num_heads, k_dim, v_dim = state_ZHXV.shape
    variant = delta_variant(k_dim, is_tiled=is_tiled)
    variant.launch(
        delta.advance_state,
        (-(-v_dim // variant.constants["B"]), num_heads, states.source_R.size(0)),
        *(qkv_TW, a_TH, b_TH, a_log_H, dt_bias_H, out_TW, state_ZHXV, *states, position_T),
        *(qkv_TW.stride(0), a_TH.stride(0), b_TH.stride(0), out_TW.stride(0), state_ZHXV.stride(0)),
        *(num_keys, v_dim, k_dim**-0.5),
    )


def gated_norm(out_TW: Tensor, x_TW: Tensor, gate_TW: Tensor, weight_V: Tensor, eps: float) -> None:
    """Write `models.ops.GatedNorm`."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW, gate=gate_TW)
    v_dim = weight_V.size(0)
    num_heads = x_TW.size(1) // v_dim
    variant = gated_norm_variant(v_dim)
    variant.launch(
        delta.gated_norm_heads,
        (x_TW.size(0), -(-num_heads // variant.constants["H"])),
        *(x_TW, gate_TW, weight_V, out_TW, x_TW.stride(0), gate_TW.stride(0), out_TW.stride(0)),
        *(num_heads, v_dim, eps),
    )


def gate(out_TW: Tensor, x_TW: Tensor, gate_TW: Tensor) -> None:
    """Write `models.ops.Gate`."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW, gate=gate_TW)
    width = out_TW.size(1)
    block_variant().launch(
        delta.gate_block,
        (out_TW.size(0), -(-width // COLUMNS)),
        *(x_TW, gate_TW, out_TW, x_TW.stride(0), gate_TW.stride(0), out_TW.stride(0), width),
    )


def arrange(out_TW: Tensor, x_TW: Tensor, column_W: Tensor) -> None:
    """Write x[:, column] for each column of out; `column_W` is int32."""
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW)
    width = out_TW.size(1)
    block_variant().launch(
        delta.arrange_block,
        (out_TW.size(0), -(-width // COLUMNS)),
        *(x_TW, column_W, out_TW, x_TW.stride(0), out_TW.stride(0), width),
    )
