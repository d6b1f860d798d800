"""Grouped-query attention over a paged KV cache.

Decode rows are split: one program per split of 256 positions, counted from 0, writes a partial result, and
`merge_splits` adds the partial results in ascending order. Chunks are computed in one pass. Rows that share a prefix
read its whole splits together (`attend_groups`). Tiles of keys start at multiples of the tile size, so a row's order of
sums depends on its own positions only, neither on the batch nor on the rows of a tile.

    out = Σ e^(s - max s) v / Σ e^(s - max s),   s = cap(scale · q kᵀ),   online softmax (arXiv 1805.02867)

Keys outside a row's range are not loaded: unwritten slots may hold NaN, and their block table entries any number.

Shapes: T tokens of the step, R rows, H heads, J kv heads, G query heads per kv head, D head size (P padded), S slots of
the cache, B blocks per row, N splits, M rows of a tile (queries times G), C keys of a tile, Q tiles of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel, capped, dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, W: tl.constexpr) -> tl.tensor:
    """Return zeros for the rows of W parts."""
    if W == 1:
        return tl.zeros([M, N], tl.float32)
    else:
        return tl.zeros([W, M, N], tl.float32)


@triton.jit
def load_keys(pointer_AB: tl.tensor, mask_AB: tl.tensor, W: tl.constexpr) -> tl.tensor:
    """Load keys or values once for W parts."""
    if W == 1:
        return tl.load(pointer_AB, mask=mask_AB, other=0.0)
    else:
        x_1AB = tl.load(pointer_AB[None, :, :], mask=mask_AB[None, :, :], other=0.0)
        return tl.broadcast_to(x_1AB, [W, x_1AB.shape[1], x_1AB.shape[2]])


@triton.jit
def attend_keys(
    q_MP: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    table_B: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    kv_head: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    W: tl.constexpr = 1,
) -> tl.tensor:
    """Return the largest score, the mass (both in base 2) and the output of each row m over its keys [low_M, high_M).

    Reads keys in [low, high) only. With `W` above 1, M is [W, M] in all shapes: each warp has the M rows of a part.
    """
    best_M = tl.full(high_M.shape, float("-inf"), tl.float32)
    out_MP = zeros(M, P, W)
    # A sum's order is the same however warps divide a row if a product adds. `attend_chunk` replaces no other kernel.
    ADDS_BY_PRODUCT: tl.constexpr = M <= 32
    if ADDS_BY_PRODUCT:
        E: tl.constexpr = 2 * M if W == 1 else 8
        mass_ME = zeros(M, E, W)
        one_CE = (zeros(C, E, W) + 1.0).to(v_SJD.dtype.element_ty)
    else:
        mass_M = tl.zeros([M], tl.float32)
    dim_P = tl.arange(0, P)
    for first in range(low // C * C, high, C):
        position_C = first + tl.arange(0, C)
        loaded_C = (position_C >= low) & (position_C < high)
        block_C = tl.load(table_B + position_C // block_size, mask=loaded_C, other=0).to(tl.int64)
        at_C = ((block_C * block_size + position_C % block_size) * num_kv + kv_head) * D
        at_CP = at_C[:, None] + dim_P[None, :]
        loaded_CP = loaded_C[:, None] & (dim_P < D)[None, :]
        k_CP = load_keys(k_SJD + at_CP, loaded_CP, W)
        k_PC = tl.trans(k_CP) if W == 1 else tl.permute(k_CP, 0, 2, 1)
        score_MC = dot(q_MP, k_PC, UPCAST) * scale
        if HAS_CAP:
            score_MC = capped(score_MC, cap)
        seen_MC = (position_C >= tl.expand_dims(low_M, -1)) & (position_C < tl.expand_dims(high_M, -1))
        score_MC = tl.where(seen_MC, score_MC * LOG2_E, float("-inf"))
        new_M = tl.maximum(best_M, tl.max(score_MC, -1))
        shift_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        weight_MC = tl.exp2(score_MC - tl.expand_dims(shift_M, -1))
        decay_M = tl.exp2(best_M - shift_M)
        v_CP = load_keys(v_SJD + at_CP, loaded_CP, W)
        rounded_MC = weight_MC.to(v_CP.dtype)
        out_MP = out_MP * tl.expand_dims(decay_M, -1) + dot(rounded_MC, v_CP, UPCAST)
        if ADDS_BY_PRODUCT:
            mass_ME = mass_ME * tl.expand_dims(decay_M, -1) + dot(rounded_MC, one_CE, UPCAST)
        else:
            mass_M = mass_M * decay_M + tl.sum(weight_MC, 1)
        best_M = new_M
    if ADDS_BY_PRODUCT:
        mass_M = tl.max(mass_ME, -1)  # all are equal
    return best_M, mass_M, out_MP


@triton.jit
def store_partial(
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    best_M: tl.tensor,
    mass_M: tl.tensor,
    out_MP: tl.tensor,
    index_M: tl.tensor,
    valid_M: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Write one split's normalised output and the log2 of its mass. Rows that see no key of the split write NaN."""
    dim_P = tl.arange(0, P)
    tl.store(
        part_THND + tl.expand_dims(index_M, -1) * D + dim_P,
        out_MP / tl.expand_dims(mass_M, -1),
        mask=tl.expand_dims(valid_M, -1) & (dim_P < D),
    )
    tl.store(score_THN + index_M, best_M + tl.log2(mass_M), mask=valid_M)


@triton.jit(do_not_specialize=["window", "num_splits", "num_tiles"])
def attend_split(
    q_TW: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    table_RB: tl.tensor,
    start_R: tl.tensor,
    length_R: tl.tensor,
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    num_splits: tl.tensor,
    num_tiles: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Attend for M // G queries of one row over one split. Grid: (rows · num_tiles, kv heads, splits)."""
    begin_kernel()
    row = tl.program_id(0) // num_tiles
    first_query = tl.program_id(0) % num_tiles * (M // G)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    begin = tl.load(start_R + row)
    num_queries = tl.load(start_R + row + 1) - begin
    context = tl.load(length_R + row) - num_queries
    last_query = tl.minimum(first_query + M // G, num_queries)
    low = tl.maximum(split * SPLIT, context + first_query + 1 - window)
    high = tl.minimum(split * SPLIT + SPLIT, context + last_query)
    if (first_query < num_queries) & (low < high):
        place_M, dim_P = tl.arange(0, M), tl.arange(0, P)
        query_M = first_query + place_M // G
        valid_M = (place_M < M // G * G) & (query_M < num_queries)
        high_M = context + query_M + 1
        head_M = (begin + query_M).to(tl.int64) * (num_kv * G) + kv_head * G + place_M % G
        q_MP = tl.load(
            q_TW
            + ((begin + query_M).to(tl.int64) * q_stride + (kv_head * G + place_M % G) * D)[:, None]
            + dim_P[None, :],
            mask=valid_M[:, None] & (dim_P < D)[None, :],
            other=0.0,
        )
        table_B = table_RB + row.to(tl.int64) * table_stride
        best_M, mass_M, out_MP = attend_keys(
            q_MP, k_SJD, v_SJD, table_B, high_M - window, high_M, low, high, kv_head, num_kv, block_size, scale, cap,
            D, P, M, C, HAS_CAP, UPCAST,
        )  # fmt: skip
        store_partial(part_THND, score_THN, best_M, mass_M, out_MP, head_M * num_splits + split, valid_M, D, P)


@triton.jit
def attend_tokens(
    q_TW: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    table_B: tl.tensor,
    row_M: tl.tensor,
    high_M: tl.tensor,
    place_M: tl.tensor,
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    q_stride: tl.tensor,
    kv_head: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """Attend over one split for decode rows, each the query head `place` % G of a row with `high` keys; 0: none."""
    low = tl.maximum(split * SPLIT, tl.min(tl.where(high_M > 0, high_M, 2147483647)) - window)
    high = tl.minimum(split * SPLIT + SPLIT, tl.max(high_M))
    if low < high:
        dim_P = tl.arange(0, P)
        q_MP = tl.load(
            q_TW + tl.expand_dims(row_M.to(tl.int64) * q_stride + (kv_head * G + place_M % G) * D, -1) + dim_P,
            mask=dim_P < D,
            other=0.0,
        )
        best_M, mass_M, out_MP = attend_keys(
            q_MP, k_SJD, v_SJD, table_B, high_M - window, high_M, low, high, kv_head, num_kv, block_size, scale, cap,
            D, P, M, C, HAS_CAP, UPCAST, W,
        )  # fmt: skip
        index_M = (row_M.to(tl.int64) * (num_kv * G) + kv_head * G + place_M % G) * num_splits + split
        store_partial(part_THND, score_THN, best_M, mass_M, out_MP, index_M, place_M >= 0, D, P)


@triton.jit
def found(end_X: tl.tensor, size_X: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return which of adjacent ranges an index is in, and its place there."""
    before = tl.sum(tl.where(end_X <= index, size_X.to(tl.int64) + (1 << 32), 0))
    return (before >> 32).to(tl.int32), index - before.to(tl.int32)


@triton.jit(do_not_specialize=["window", "num_splits", "num_tiles", "num_rows"])
def attend_group(
    q_TW: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    table_RB: tl.tensor,
    length_R: tl.tensor,
    shared_R: tl.tensor,
    row_QX: tl.tensor,
    shared_Q: tl.tensor,
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    num_splits: tl.tensor,
    num_tiles: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    W: tl.constexpr,
    ROW_M: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Attend for decode rows, W · M // G at a time over the splits of their common prefix. Grid: (programs, kv heads).

    A program lists all splits there are, those of tiles before those of rows, and computes each `programs`-th of them.
    A tile's keys are read once: each warp computes a part, M rows, of all its rows.
    """
    begin_kernel()
    kv_head = tl.program_id(1)
    # list the splits: where those of each tile and of each row end
    tile_Q, row_R = tl.arange(0, QUERY_TILES), tl.arange(0, 2 * QUERY_TILES)
    size_Q = tl.load(shared_Q + tile_Q, mask=tile_Q < num_tiles, other=0) // SPLIT
    end_Q = tl.cumsum(size_Q, 0)
    num_shared = tl.max(end_Q, 0)
    keys_R = tl.load(length_R + row_R, mask=row_R < num_rows, other=0)
    shared_of_R = tl.load(shared_R + row_R, mask=row_R < num_rows, other=0)
    size_R = tl.maximum((keys_R + SPLIT - 1) // SPLIT - tl.maximum(shared_of_R, keys_R - window) // SPLIT, 0)
    end_R = tl.cumsum(size_R, 0)
    # without `disable_licm` the compiler keeps more values in registers
    for index in tl.range(tl.program_id(0), num_shared + tl.max(end_R, 0), tl.num_programs(0), disable_licm=True):
        if index < num_shared:
            tile, split = found(end_Q, size_Q, index)
            place_M = tl.arange(0, W * M)
            if W > 1:
                place_M = tl.reshape(place_M, [W, M])
            first_row = tl.load(row_QX + tile * (W * M // G))
            row_M = tl.load(row_QX + tile * (W * M // G) + place_M // G, mask=place_M < W * M // G * G, other=-1)
            row_M = tl.where(row_M < 0, first_row, row_M)
            high_M = tl.load(length_R + row_M)
            attend_tokens(
                q_TW, k_SJD, v_SJD, table_RB + first_row.to(tl.int64) * table_stride, row_M, high_M, place_M,
                part_THND, score_THN, q_stride, kv_head, num_kv, block_size, split, num_splits, window, scale, cap,
                D, P, G, M, C, SPLIT, HAS_CAP, UPCAST, W,
            )  # fmt: skip
        else:
            row, split = found(end_R, size_R, index - num_shared)
            keys = tl.load(length_R + row)
            split += tl.maximum(tl.load(shared_R + row), keys - window) // SPLIT
            place_N = tl.arange(0, ROW_M)
            attend_tokens(
                q_TW, k_SJD, v_SJD, table_RB + row.to(tl.int64) * table_stride, place_N * 0 + row,
                place_N * 0 + keys, place_N, part_THND, score_THN, q_stride, kv_head, num_kv, block_size,
                split, num_splits, window, scale, cap, D, P, G, ROW_M, C, SPLIT, HAS_CAP, UPCAST, 1,
            )  # fmt: skip


@triton.jit
def merged(
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    head_M: tl.tensor,
    valid_M: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    num_splits: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
) -> tl.tensor:
    """Return the outputs of heads of tokens from the partial results of splits [first, end), in ascending order."""
    dim_P = tl.arange(0, P)
    valid_MP = valid_M[:, None] & (dim_P < D)[None, :]
    best_M, mass_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    out_MP = tl.zeros([M, P], tl.float32)
    for split in range(first, end):
        at_M = head_M * num_splits + split
        # others may have written them in this kernel: not in L1
        score_M = tl.load(score_THN + at_M, mask=valid_M, other=0.0, cache_modifier=".cg")
        at_MP = at_M[:, None] * D + dim_P[None, :]
        part_MP = tl.load(part_THND + at_MP, mask=valid_MP, other=0.0, cache_modifier=".cg")
        new_M = tl.maximum(best_M, score_M)
        decay_M, weight_M = tl.exp2(best_M - new_M), tl.exp2(score_M - new_M)
        out_MP = out_MP * decay_M[:, None] + part_MP * weight_M[:, None]
        mass_M = mass_M * decay_M + weight_M
        best_M = new_M
    return out_MP / mass_M[:, None]


@triton.jit(do_not_specialize=["window", "num_splits"])
def merge_split(
    part_THND: tl.tensor,
    score_THN: tl.tensor,
    position_T: tl.tensor,
    out_THD: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Add the partial results of one head of one token, in ascending order of splits. Grid: (tokens, heads)."""
    begin_kernel()
    token = tl.program_id(0).to(tl.int64)
    head_1 = token * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    position = tl.load(position_T + token)
    if position >= 0:
        dim_P = tl.arange(0, P)
        first, end = tl.maximum(0, position + 1 - window) // SPLIT, position // SPLIT + 1
        out_1P = merged(part_THND, score_THN, head_1, head_1 >= 0, first, end, num_splits, D, P, 1)
        at_1P = head_1[:, None] * D + dim_P[None, :]
        tl.store(out_THD + at_1P, out_1P.to(out_THD.dtype.element_ty), mask=(dim_P < D)[None, :])


@triton.jit(do_not_specialize=["window", "num_tiles"])
def attend_chunk(
    q_TW: tl.tensor,
    k_SJD: tl.tensor,
    v_SJD: tl.tensor,
    table_RB: tl.tensor,
    start_R: tl.tensor,
    length_R: tl.tensor,
    out_THD: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv: tl.tensor,
    block_size: tl.tensor,
    num_tiles: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Attend for M // G queries of one row over all their keys. Grid: (rows · num_tiles, kv heads)."""
    begin_kernel()
    row = tl.program_id(0) // num_tiles
    first_query = tl.program_id(0) % num_tiles * (M // G)
    kv_head = tl.program_id(1)
    begin = tl.load(start_R + row)
    num_queries = tl.load(start_R + row + 1) - begin
    context = tl.load(length_R + row) - num_queries
    if (first_query < num_queries) & (context >= 0):
        place_M, dim_P = tl.arange(0, M), tl.arange(0, P)
        query_M = first_query + place_M // G
        valid_M = (place_M < M // G * G) & (query_M < num_queries)
        high_M = context + query_M + 1
        token_M = (begin + query_M).to(tl.int64)
        q_MP = tl.load(
            q_TW + (token_M * q_stride + (kv_head * G + place_M % G) * D)[:, None] + dim_P[None, :],
            mask=valid_M[:, None] & (dim_P < D)[None, :],
            other=0.0,
        )
        low = tl.maximum(0, context + first_query + 1 - window)
        high = context + tl.minimum(first_query + M // G, num_queries)
        _best_M, mass_M, out_MP = attend_keys(
            q_MP, k_SJD, v_SJD, table_RB + row.to(tl.int64) * table_stride, high_M - window, high_M, low, high,
            kv_head, num_kv, block_size, scale, cap, D, P, M, C, HAS_CAP, UPCAST,
        )  # fmt: skip
        head_M = token_M * (num_kv * G) + kv_head * G + place_M % G
        tl.store(
            out_THD + head_M[:, None] * D + dim_P[None, :],
            (out_MP / mass_M[:, None]).to(out_THD.dtype.element_ty),
            mask=valid_M[:, None] & (dim_P < D)[None, :],
        )
