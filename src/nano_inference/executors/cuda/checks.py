"""Checks of arguments that the CUDA kernels and their plain counterparts share. Each raises `ValueError`.

Shapes: T tokens of the step, H heads, J kv heads, D head size, S slots of the cache, B rows, V vocabulary, W width,
N outputs and K inputs of a matrix, Z ranges of inputs, Q tiles, X rows per tile, L positions, F rotary size / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.records import (
    HEAD_DIMS,
    RATIOS,
    Cache,
    Groups,
    LowRankStack,
    NewHeads,
    RangeMemory,
    group_rows,
    num_sums,
)
from nano_inference.executors.cuda.sample_records import Scratch
from nano_inference.executors.torch.attention.context import AttentionSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # supported precisions of activations, weights and caches
MOST_COLUMNS = 1 << 14  # largest width of a norm
MOST_TAPS, MOST_KEYS = 16, 256  # of a convolution, and values of a key of the gated delta rule


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` naming the argument if the kernels do not support its precision."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def check_rows(**tensors: Tensor) -> None:
    """Raise `ValueError` naming an argument whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.stride(-1) != 1 and tensor.size(-1) > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_heads(ratio: int, head_dim: int) -> None:
    """Check query heads per kv head, and the head size."""
    if ratio not in RATIOS:
        raise ValueError(f"query heads per kv head must be one of {RATIOS}, got {ratio}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")


def check_queries(q_THD: Tensor, cache: Cache) -> None:
    check_dtype("q", q_THD)
    check_rows(q=q_THD, k=cache.k_SJD, v=cache.v_SJD, table=cache.table_RB)
    num_heads, head_dim = q_THD.shape[1:]
    num_kv = cache.k_SJD.size(1)
    if cache.k_SJD.dtype != q_THD.dtype or cache.v_SJD.dtype != q_THD.dtype:
        raise ValueError(f"queries and cache must have one precision, got {q_THD.dtype} and {cache.k_SJD.dtype}")
    if num_heads % num_kv or head_dim != cache.k_SJD.size(2) or q_THD.stride(1) != head_dim:
        raise ValueError(f"queries {tuple(q_THD.shape)} do not match the cache {tuple(cache.k_SJD.shape)}")


def check_groups(groups: Groups, q_THD: Tensor, num_kv: int) -> None:
    width, right = groups.row_QX.size(1), group_rows(q_THD.size(1) // num_kv, q_THD.dtype, q_THD.size(2))
    if width != right:
        raise ValueError(f"groups.row_QX must have {right} rows per tile, got {width}")


def check_width(width: int) -> None:
    if width > MOST_COLUMNS:
        raise ValueError(f"norms support rows of {MOST_COLUMNS} values, got {width}")


def check_norm(out_TW: Tensor, x_TW: Tensor, more_TW: Tensor | None, sum_TW: Tensor | None) -> None:
    check_dtype("x", x_TW)
    check_rows(out=out_TW, x=x_TW)
    if (more_TW is None) != (sum_TW is None):
        raise ValueError("norm needs both more_TW and sum_TW, or neither")
    if sum_TW is not None and sum_TW.stride(0) != out_TW.stride(0):
        raise ValueError(f"sum_TW and out_TW must have the same strides, got {sum_TW.stride(0)} and {out_TW.stride(0)}")
    check_width(x_TW.size(1))


def check_heads_of_rows(q_THD: Tensor, qkv_TW: Tensor, cos_LF: Tensor | None, cache: Cache) -> None:
    check_dtype("qkv", qkv_TW)
    check_rows(qkv=qkv_TW)
    num_heads, head_dim = q_THD.shape[1:]
    num_kv = cache.k_SJD.size(1)
    if qkv_TW.size(1) != (num_heads + 2 * num_kv) * head_dim:
        raise ValueError(f"qkv rows have {qkv_TW.size(1)} values, {num_heads} + 2 x {num_kv} heads need another number")
    if cos_LF is not None and 2 * cos_LF.size(1) > head_dim:
        raise ValueError(
            f"cos_LF must have at most {head_dim // 2} columns, half of the head size; got {cos_LF.size(1)}"
        )


def check_rows_of_few(out_THD: Tensor, heads: NewHeads, cache: Cache, spec: AttentionSpec, done_I: Tensor) -> None:
    check_heads_of_rows(out_THD, heads.qkv_TW, heads.cos_LF, cache)
    needed = out_THD.size(0) * cache.k_SJD.size(1)
    if done_I.numel() < needed:
        raise ValueError(f"done_I must have {needed} values, got {done_I.numel()}")
    if spec.softcap is not None:
        raise ValueError("attend_rows supports no soft cap")


def check_product(out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, memory: RangeMemory) -> None:
    check_dtype("x", x_TK)
    check_rows(out=out_TN, x=x_TK, weight=weight_NK)
    (num_out, num_in), num_tokens = weight_NK.shape, x_TK.size(0)
    needed, given = num_sums(num_tokens, num_out, num_in), memory.part_ZTN.numel()
    if given < needed:
        raise ValueError(f"part_ZTN must have {needed} values, got {given}")


def check_adapters(out_TN: Tensor, x_TK: Tensor, stack: LowRankStack, index_T: Tensor) -> None:
    check_dtype("x", x_TK)
    check_rows(out=out_TN, x=x_TK)
    given = (out_TN.size(1), x_TK.size(1), index_T.size(0))
    needed = (stack.b_XNR.size(1), stack.a_XMRK.size(3), x_TK.size(0))
    if given != needed:
        raise ValueError(f"outputs, inputs and indices must be {needed}, got {given}")
    if x_TK.size(0) > stack.low_TMR.size(0):
        raise ValueError(f"at most {stack.low_TMR.size(0)} tokens, got {x_TK.size(0)}")


def check_taps(taps: int) -> None:
    if taps > MOST_TAPS:
        raise ValueError(f"Convolve: the CUDA kernels have at most {MOST_TAPS} taps, not {taps}")


def check_key_size(size: int) -> None:
    if size > MOST_KEYS:
        raise ValueError(f"GatedDelta: the CUDA kernels have keys of at most {MOST_KEYS} values, not {size}")


def check_convolution(out_TC: Tensor, x_TC: Tensor, weight_C1K: Tensor, state_ZJC: Tensor) -> None:
    check_dtype("x", x_TC)
    check_rows(out=out_TC, x=x_TC)
    check_taps(weight_C1K.size(2))
    channels = x_TC.size(1)
    if state_ZJC.shape[1:] != (weight_C1K.size(2) - 1, channels) or state_ZJC.stride()[1:] != (channels, 1):
        raise ValueError(f"a state {tuple(state_ZJC.shape)} does not fit {channels} channels")


def check_delta(out_TW: Tensor, qkv_TW: Tensor, a_TH: Tensor, b_TH: Tensor, state_ZHXV: Tensor) -> int:
    """Return the number of key heads."""
    check_dtype("qkv", qkv_TW)
    check_rows(out=out_TW, qkv=qkv_TW, a=a_TH, b=b_TH)
    num_heads, k_dim, v_dim = state_ZHXV.shape[1:]
    check_key_size(k_dim)
    num_keys, rest = divmod(qkv_TW.size(1) - num_heads * v_dim, 2 * k_dim)
    is_adjacent = state_ZHXV.stride()[1:] == (k_dim * v_dim, v_dim, 1)
    if rest or num_keys < 1 or num_heads % num_keys or not is_adjacent:
        raise ValueError(f"qkv rows of {qkv_TW.size(1)} values do not fit a state {tuple(state_ZHXV.shape)}")
    return num_keys


def check_logits(out: Scratch, logits_BV: Tensor) -> None:
    check_dtype("logits", logits_BV)
    check_rows(logits=logits_BV)
    if logits_BV.size(1) < out.work.size(1) or logits_BV.size(0) > out.work.size(0):
        raise ValueError(f"logits {tuple(logits_BV.shape)} do not fit the buffers {tuple(out.work.shape)}")
