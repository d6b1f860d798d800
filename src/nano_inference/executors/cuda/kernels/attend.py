"""Launchers of the attention kernels.

Decode: `attend_rows` for few rows, others `attend_groups` if they share prefixes, else `attend_splits`; then
`merge_splits`. Prefill: `attend_chunks`.

Shapes: T tokens of the step, R rows, H heads, J kv heads, D head size, S slots of the cache, B blocks per row,
N splits, Q tiles of rows that share a prefix, X rows per tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_groups, check_heads, check_queries, check_rows_of_few
from nano_inference.executors.cuda.kernels import attention, fused
from nano_inference.executors.cuda.kernels.variant import Variant, is_interpreted, padded
from nano_inference.executors.cuda.records import (
    NO_WINDOW,
    NORM_ORDERS,
    PROGRAMS,
    SPLIT,
    Cache,
    Groups,
    NewHeads,
    NormOrder,
    Partials,
    Rows,
    group_tile,
)
from nano_inference.executors.torch.attention.context import AttentionSpec

_DECODE_ROWS, _PIECE_ROWS, _CHUNK_ROWS = 16, 32, 64
"""Rows of a tile: queries times query heads per kv head. A row has the same bits in tiles of all kinds but chunks."""
_GROUP_REGISTERS = 168  # three programs of four warps on a multiprocessor
_GROUP_PROGRAMS = 4 * PROGRAMS
"""Most programs of `attend_groups`: each computes several splits if there are more."""

Kind = Literal["split", "piece", "group", "chunk"]
"""`attend_splits` of one token or more a row, `attend_groups`, `attend_chunks`."""


def attend_variant(
    kind: Kind, dtype: torch.dtype, ratio: int, head_dim: int, *, has_cap: bool, num_tiles: int = 1
) -> Variant:
    """Return the constants of a kernel. `num_tiles` is the number of tiles of rows that share a prefix.

    Raises `ValueError` if the ratio or the head size is not supported.
    """
    check_heads(ratio, head_dim)
    is_float32 = dtype == torch.float32
    is_large_chunk = kind == "chunk" and not is_float32 and head_dim <= 128
    constants = {
        "D": head_dim,
        "P": padded(head_dim),
        "G": ratio,
        "M": _DECODE_ROWS if kind == "split" else _CHUNK_ROWS if is_large_chunk else _PIECE_ROWS,
        "C": 16 if is_float32 else 64 if head_dim <= 128 else 32,
        "HAS_CAP": has_cap,
        "UPCAST": False,
    }
    if kind != "chunk":
        constants["SPLIT"] = SPLIT
    if kind == "group":
        rows = group_tile(dtype, head_dim)
        constants |= {"M": rows, "W": 1, "ROW_M": _DECODE_ROWS, "QUERY_TILES": padded(num_tiles)}
        if rows > _PIECE_ROWS:
            constants |= {"M": 16, "W": rows // 16}
            most = _GROUP_REGISTERS if ratio > 1 else None  # one query head a kv head needs more, and would spill
            return Variant(constants=constants, num_warps=rows // 16, num_stages=2, max_registers=most, fuses=False)
    return Variant(constants=constants, num_warps=8 if is_float32 else 4, num_stages=2, fuses=False)


def row_variant(dtype: torch.dtype, head_dim: int, order: NormOrder, *, has_weight: bool, has_offset: bool) -> Variant:
    """Return the constants of `attend_rows`: those of `attend_splits` and of the norms of heads."""
    found = attend_variant("split", dtype, 1, head_dim, has_cap=False)
    constants = {name: found.constants[name] for name in ("D", "P", "M", "C", "SPLIT", "UPCAST")}
    constants |= {"NORM": NORM_ORDERS.index(order), "HAS_WEIGHT": has_weight, "HAS_OFFSET": has_offset}
    return replace(found, constants=constants)


def merge_variant(head_dim: int) -> Variant:
    """Return the constants of `merge_splits`."""
    return Variant(constants={"D": head_dim, "P": padded(head_dim), "SPLIT": SPLIT}, num_warps=1, fuses=False)


def attend_splits(
    out: Partials,
    q_THD: Tensor,
    cache: Cache,
    rows: Rows,
    spec: AttentionSpec,
    *,
    max_queries: int = 1,
) -> None:
    """Write the partial results of every split that each token sees.

    `max_queries` is at least the tokens of each row; `q_THD` may be a slice of wider rows. The K/V of the step's tokens
    must be stored already.
    """
    rows_of_tile = max_queries * (q_THD.size(1) // cache.k_SJD.size(1))
    variant = _variant("split" if rows_of_tile <= _DECODE_ROWS else "piece", q_THD, cache, spec)
    num_tiles, grid = _tiles(variant, rows, cache, max_queries)
    splits = out.score_THN.size(2)
    variant.launch(
        attention.attend_split,
        (*grid, splits),
        *_read(q_THD, cache, rows),
        *out,
        *_strides(q_THD, cache),
        splits,
        num_tiles,
        *_scores(spec),
    )


def attend_groups(out: Partials, q_THD: Tensor, cache: Cache, rows: Rows, groups: Groups, spec: AttentionSpec) -> None:
    """Write the partial results of every split, those that rows share by tiles. All rows have one token."""
    num_tiles, num_rows, num_kv = groups.row_QX.size(0), rows.length_R.size(0), cache.k_SJD.size(1)
    variant = _variant("group", q_THD, cache, spec, num_tiles=max(num_tiles, -(-num_rows // 2)))
    check_groups(groups, q_THD, num_kv)
    splits = out.score_THN.size(2)
    variant.launch(
        attention.attend_group,
        (min((num_tiles + num_rows) * splits, -(-_GROUP_PROGRAMS // num_kv)), num_kv),
        q_THD,
        *cache[:3],
        rows.length_R,
        rows.shared_R,
        *groups,
        *out,
        *_strides(q_THD, cache),
        splits,
        num_tiles,
        num_rows,
        *_scores(spec),
    )


def merge_splits(out_THD: Tensor, partials: Partials, position_T: Tensor, window: int | None) -> None:
    """Write the attention output of each token at `position_T` (int32; negative: leaves the output unchanged)."""
    num_tokens, num_heads, head_dim = out_THD.shape
    merge_variant(head_dim).launch(
        attention.merge_split,
        (num_tokens, num_heads),
        *partials,
        position_T,
        out_THD,
        partials.score_THN.size(2),
        window or NO_WINDOW,
    )


def attend_rows(
    out_THD: Tensor, partials: Partials, heads: NewHeads, position_T: Tensor, cache: Cache, spec: AttentionSpec,
    done_I: Tensor,
) -> None:  # fmt: skip
    """Write the attention output of tokens that each are a row, and their keys and values to the cache.

    Computes `operate.rotate_and_store`, `attend_splits` and `merge_splits`, with a rotation and without a soft cap.
    Row t of the block table is that of token t. `done_I` (int32) has a number for each token and kv head: zeros before
    and after.
    """
    check_rows_of_few(out_THD, heads, cache, spec, done_I)
    num_tokens, num_heads, head_dim = out_THD.shape
    num_kv, splits, norms, qkv = cache.k_SJD.size(1), partials.score_THN.size(2), heads.norms, heads.qkv_TW
    check_heads(num_heads // num_kv, head_dim)
    has_weight, has_offset = norms.q_D is not None, norms.offset != 0
    variant = row_variant(qkv.dtype, head_dim, norms.order, has_weight=has_weight, has_offset=has_offset)
    q_norm, k_norm = (qkv if one is None else one for one in (norms.q_D, norms.k_D))
    (variant.upcast() if is_interpreted(qkv) else variant).launch(
        fused.attend_row,
        (num_tokens, num_kv, splits),
        *(qkv, q_norm, k_norm, heads.cos_LF, heads.sin_LF, position_T, cache.table_RB, cache.k_SJD, cache.v_SJD),
        *(*partials, done_I, out_THD, qkv.stride(0), cache.table_RB.stride(0), num_heads // num_kv, num_kv),
        *(cache.block_size, splits, norms.eps, norms.offset, 2 * heads.cos_LF.size(1)),
        *(spec.window or NO_WINDOW, spec.scale),
    )


def attend_chunks(
    out_THD: Tensor, q_THD: Tensor, cache: Cache, rows: Rows, spec: AttentionSpec, *, max_queries: int
) -> None:
    """Write the attention output of every token, [T, H, D] contiguous; see `attend_splits` for the arguments."""
    variant = _variant("chunk", q_THD, cache, spec)
    num_tiles, grid = _tiles(variant, rows, cache, max_queries)
    variant.launch(
        attention.attend_chunk,
        grid,
        *_read(q_THD, cache, rows),
        out_THD,
        *_strides(q_THD, cache),
        num_tiles,
        *_scores(spec),
    )


def _variant(kind: Kind, q_THD: Tensor, cache: Cache, spec: AttentionSpec, *, num_tiles: int = 1) -> Variant:
    """Check the arguments; return the constants, for the interpreter if the tensors are on the CPU."""
    check_queries(q_THD, cache)
    num_heads, head_dim = q_THD.shape[1:]
    num_kv = cache.k_SJD.size(1)
    ratio, has_cap = num_heads // num_kv, spec.softcap is not None
    found = attend_variant(kind, q_THD.dtype, ratio, head_dim, has_cap=has_cap, num_tiles=num_tiles)
    return found.upcast() if is_interpreted(q_THD) else found


def _tiles(variant: Variant, rows: Rows, cache: Cache, max_queries: int) -> tuple[int, tuple[int, int]]:
    """Return the tiles of queries per row, and the first two dimensions of the grid."""
    num_tiles = -(-max_queries // (variant.constants["M"] // variant.constants["G"]))
    return num_tiles, (rows.length_R.size(0) * num_tiles, cache.k_SJD.size(1))


def _read(q_THD: Tensor, cache: Cache, rows: Rows) -> tuple[Tensor, ...]:
    return q_THD, cache.k_SJD, cache.v_SJD, cache.table_RB, rows.start_R, rows.length_R


def _strides(q_THD: Tensor, cache: Cache) -> tuple[int, ...]:
    return q_THD.stride(0), cache.table_RB.stride(0), cache.k_SJD.size(1), cache.block_size


def _scores(spec: AttentionSpec) -> tuple[float, ...]:
    return spec.window or NO_WINDOW, spec.scale, spec.softcap or 1.0
