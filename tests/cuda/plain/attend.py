"""The launchers of `kernels.attend` in plain torch: every split of every row at once, whatever the lengths.

Splits are matrix products of one shape and are added one by one, so a row's bits do not depend on the batch.

Shapes: T tokens of the step, R rows, L queries per row, H heads, J kv heads, G query heads per kv head, M = L · G,
D head size, S slots of the cache, B blocks per row, N splits, C = `SPLIT` keys, K = N · C, Q tiles of rows that share a
prefix, X rows per tile, P = Q · X.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.executors.cuda.checks import check_groups, check_queries, check_rows_of_few
from nano_inference.executors.cuda.records import NO_WINDOW, SPLIT, Cache, Groups, NewHeads, Partials, Rows, num_splits
from nano_inference.executors.torch.attention.context import AttentionSpec
from tests.cuda.plain import operate

_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)


class _Queries(NamedTuple):
    """Padded queries of rows."""

    q_RLHD: Tensor
    table_RB: Tensor
    position_RL: Tensor  # -1: no query


def attend_splits(
    out: Partials,
    q_THD: Tensor,
    cache: Cache,
    rows: Rows,
    spec: AttentionSpec,
    *,
    max_queries: int = 1,
) -> None:
    """Write the partial results of every split that each token sees."""
    check_queries(q_THD, cache)
    queries = _queries(q_THD, cache, rows, max_queries)
    found, sees_RLN = _attend_singly(queries, cache, spec, out.score_THN.size(2))
    row_T, query_T, is_valid_T = _places(rows, q_THD.size(0), max_queries)
    part_THND, score_THN = (x[row_T, query_T] for x in found)
    _write(out, Partials(part_THND, score_THN), sees_RLN[row_T, query_T] & is_valid_T.unsqueeze(-1))


def attend_groups(out: Partials, q_THD: Tensor, cache: Cache, rows: Rows, groups: Groups, spec: AttentionSpec) -> None:
    """Write the partial results of every split, those that rows share by tiles. All rows have one token."""
    attend_splits(out, q_THD, cache, rows, spec)
    check_groups(groups, q_THD, cache.k_SJD.size(1))
    is_used_QX, row_QX = groups.row_QX >= 0, groups.row_QX.long().clamp(min=0)
    token_QX = rows.start_R.long()[row_QX].clamp(max=q_THD.size(0) - 1)
    position_QX = torch.where(is_used_QX, rows.length_R.long()[row_QX] - 1, -1)
    queries = _Queries(q_THD[token_QX], cache.table_RB[row_QX[:, 0]], position_QX)
    found, sees_QXN = _attend_singly(queries, cache, spec, out.score_THN.size(2))
    end_N = (torch.arange(sees_QXN.size(2), device=q_THD.device) + 1) * SPLIT
    sees_PN = (sees_QXN & (end_N <= groups.shared_Q.view(-1, 1, 1))).flatten(0, 1)
    index_T1 = torch.arange(q_THD.size(0), device=q_THD.device).unsqueeze(-1)
    is_here_TP = (token_QX.flatten() == index_T1) & is_used_QX.flatten()
    place_T = is_here_TP.int().argmax(-1)
    part_PHND, score_PHN = (x.flatten(0, 1) for x in found)
    _write(out, Partials(part_PHND[place_T], score_PHN[place_T]), sees_PN[place_T] & is_here_TP.any(-1, keepdim=True))


def merge_splits(out_THD: Tensor, partials: Partials, position_T: Tensor, window: int | None) -> None:
    """Write the attention output of each token at `position_T` (int32; negative: leaves the output unchanged)."""
    num_tokens = out_THD.size(0)
    split_N = torch.arange(partials.score_THN.size(2), device=out_THD.device)
    position_T1 = position_T.long().unsqueeze(-1)
    first_T1 = (position_T1 + 1 - (window or NO_WINDOW)).clamp(min=0) // SPLIT
    sees_TN = (position_T1 >= 0) & (split_N >= first_T1) & (split_N <= position_T1 // SPLIT)
    merged_THD = _merged(Partials(*(x[:num_tokens] for x in partials)), sees_TN).to(out_THD.dtype)
    out_THD.copy_(torch.where((position_T >= 0).view(-1, 1, 1), merged_THD, out_THD))


def attend_rows(
    out_THD: Tensor, partials: Partials, heads: NewHeads, position_T: Tensor, cache: Cache, spec: AttentionSpec,
    done_I: Tensor,
) -> None:  # fmt: skip
    """Write the attention output of tokens that each are a row, and their keys and values to the cache."""
    check_rows_of_few(out_THD, heads, cache, spec, done_I)
    row_T = torch.arange(out_THD.size(0), dtype=torch.int32, device=out_THD.device)
    cache = cache._replace(table_RB=cache.table_RB[: out_THD.size(0)])
    q_THD = torch.zeros_like(out_THD)
    angles = heads.cos_LF, heads.sin_LF
    operate.rotate_and_store(q_THD, heads.qkv_TW, *angles, position_T, row_T, cache, heads.norms)
    start_R = torch.arange(out_THD.size(0) + 1, dtype=torch.int32, device=out_THD.device)
    attend_splits(partials, q_THD, cache, Rows(start_R, position_T + 1, torch.zeros_like(position_T)), spec)
    merge_splits(out_THD, partials, position_T, spec.window)


def attend_chunks(
    out_THD: Tensor, q_THD: Tensor, cache: Cache, rows: Rows, spec: AttentionSpec, *, max_queries: int
) -> None:
    """Write the attention output of every token, [T, H, D]; rows of length 0 leave it unchanged."""
    check_queries(q_THD, cache)
    splits = num_splits(cache.table_RB.size(1) * cache.block_size)
    queries = _queries(q_THD, cache, rows, max_queries)
    found, sees_RLN = _attend(queries, cache, spec, splits)
    row_T, query_T, is_valid_T = _places(rows, q_THD.size(0), max_queries)
    part_THND, score_THN = (x[row_T, query_T] for x in found)
    merged_THD = _merged(Partials(part_THND, score_THN), sees_RLN[row_T, query_T]).to(out_THD.dtype)
    is_valid_T = is_valid_T & (queries.position_RL[row_T, query_T] >= 0)
    out_THD.copy_(torch.where(is_valid_T.view(-1, 1, 1), merged_THD, out_THD))


def _queries(q_THD: Tensor, cache: Cache, rows: Rows, max_queries: int) -> _Queries:
    """Return the queries of all rows."""
    start_R1, end_R1 = rows.start_R[:-1].long().unsqueeze(-1), rows.start_R[1:].long().unsqueeze(-1)
    length_R1 = rows.length_R.long().unsqueeze(-1)
    query_L = torch.arange(max_queries, device=q_THD.device)
    position_RL = length_R1 - (end_R1 - start_R1) + query_L
    is_query_RL = (query_L < end_R1 - start_R1) & (length_R1 > 0)
    token_RL = (start_R1 + query_L).clamp(0, q_THD.size(0) - 1)
    return _Queries(q_THD[token_RL], cache.table_RB, torch.where(is_query_RL, position_RL, -1))


def _places(rows: Rows, num_tokens: int, max_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's row, its index in the row, and whether a row has it."""
    index_T1 = torch.arange(num_tokens, device=rows.start_R.device).unsqueeze(-1)
    is_of_TR = (rows.start_R[:-1] <= index_T1) & (index_T1 < rows.start_R[1:])
    row_T = is_of_TR.int().argmax(-1)
    query_T = (index_T1.squeeze(-1) - rows.start_R.long()[row_T]).clamp(0, max_queries - 1)
    return row_T, query_T, is_of_TR.any(-1)


def _attend(queries: _Queries, cache: Cache, spec: AttentionSpec, splits: int) -> tuple[Partials, Tensor]:
    """Return partial results [R, L, H, N, D] and log2 masses [R, L, H, N], and which splits queries see, [R, L, N]."""
    num_kv = cache.k_SJD.size(1)
    high_RL = queries.position_RL + 1
    position_NC = torch.arange(splits * SPLIT, device=high_RL.device).view(splits, SPLIT)
    low_RL11, high_RL11 = (x.view(*high_RL.shape, 1, 1) for x in (high_RL - (spec.window or NO_WINDOW), high_RL))
    seen_RLNC = (position_NC >= low_RL11) & (position_NC < high_RL11)
    k_RJNCD, v_RJNCD = _keys(cache, queries.table_RB, seen_RLNC.any(1))
    num_rows, num_queries, num_heads, head_dim = queries.q_RLHD.shape
    ratio = num_heads // num_kv
    q_RLJGD = queries.q_RLHD.float().view(num_rows, num_queries, num_kv, ratio, head_dim)
    q_RJ1MD = q_RLJGD.transpose(1, 2).flatten(2, 3).unsqueeze(2)
    score_RJNMC = (q_RJ1MD @ k_RJNCD.transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        score_RJNMC = spec.softcap * torch.tanh(score_RJNMC / spec.softcap)
    seen_R1NMC = seen_RLNC.transpose(1, 2).repeat_interleave(ratio, 2).unsqueeze(1)
    score_RJNMC = (score_RJNMC * _LOG2_E).masked_fill(~seen_R1NMC, -torch.inf)
    best_RJNM = score_RJNMC.amax(-1)
    shift_RJNM = best_RJNM.masked_fill(best_RJNM == -torch.inf, 0.0)
    weight_RJNMC = _power(score_RJNMC - shift_RJNM.unsqueeze(-1))
    mass_RJNM = weight_RJNMC.sum(-1)
    out_RJNMD = weight_RJNMC.to(cache.v_SJD.dtype).float() @ v_RJNCD
    part_RJNMD = out_RJNMD / mass_RJNM.unsqueeze(-1)
    score_RJNM = best_RJNM + torch.log2(mass_RJNM)
    shape = (num_rows, num_kv, splits, num_queries, ratio)
    part_RLJGND = part_RJNMD.view(*shape, head_dim).permute(0, 3, 1, 4, 2, 5)
    score_RLJGN = score_RJNM.view(shape).permute(0, 3, 1, 4, 2)
    return Partials(part_RLJGND.flatten(2, 3), score_RLJGN.flatten(2, 3)), seen_RLNC.any(-1)


def _attend_singly(queries: _Queries, cache: Cache, spec: AttentionSpec, splits: int) -> tuple[Partials, Tensor]:
    """Return the results of `_attend`, one query of each row at a time: its bits do not depend on their number."""
    found = [
        _attend(_Queries(q_RHD.unsqueeze(1), queries.table_RB, position_R.unsqueeze(1)), cache, spec, splits)
        for q_RHD, position_R in zip(queries.q_RLHD.unbind(1), queries.position_RL.unbind(1), strict=True)
    ]
    part_RLHND = torch.cat([partials.part_THND for partials, _ in found], dim=1)
    score_RLHN = torch.cat([partials.score_THN for partials, _ in found], dim=1)
    return Partials(part_RLHND, score_RLHN), torch.cat([sees_R1N for _, sees_R1N in found], dim=1)


def _keys(cache: Cache, table_RB: Tensor, is_read_RNC: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of rows, float32 [R, J, N, C, D]; 0 where they are not read."""
    splits, size = is_read_RNC.shape[1:]
    position_K = torch.arange(splits * size, device=table_RB.device)
    block_K = (position_K // cache.block_size).clamp(max=table_RB.size(1) - 1)
    slot_RK = table_RB.long()[:, block_K] * cache.block_size + position_K % cache.block_size
    slot_RNC = slot_RK.clamp(0, cache.k_SJD.size(0) - 1).view(is_read_RNC.shape)
    unread_RNC11 = ~is_read_RNC.unsqueeze(-1).unsqueeze(-1)
    k_RNCJD, v_RNCJD = (x[slot_RNC].float().masked_fill(unread_RNC11, 0.0) for x in (cache.k_SJD, cache.v_SJD))
    return k_RNCJD.permute(0, 3, 1, 2, 4).contiguous(), v_RNCJD.permute(0, 3, 1, 2, 4).contiguous()


def _write(out: Partials, found: Partials, sees_TN: Tensor) -> None:
    """Write the partial results of the splits that tokens see."""
    sees_T1N = sees_TN.unsqueeze(1)
    part_THND, score_THN = (x[: sees_TN.size(0)] for x in out)
    part_THND.copy_(torch.where(sees_T1N.unsqueeze(-1), found.part_THND, part_THND))
    score_THN.copy_(torch.where(sees_T1N, found.score_THN, score_THN))


def _power(x: Tensor) -> Tensor:
    """Return 2^x. The bits of `torch.exp2` on a CPU depend on an element's place in the tensor."""
    return torch.exp(x * _LN_2)


def _merged(partials: Partials, sees_TN: Tensor) -> Tensor:
    """Return the outputs [T, H, D], float32, of the splits that tokens see, added in ascending order."""
    score_THN = partials.score_THN.masked_fill(~sees_TN.unsqueeze(1), -torch.inf)
    best_TH = score_THN.amax(-1)
    best_TH = best_TH.masked_fill(best_TH == -torch.inf, 0.0)
    out_THD = torch.zeros_like(partials.part_THND[:, :, 0])
    mass_TH = torch.zeros_like(best_TH)
    weight_THN = _power(score_THN - best_TH.unsqueeze(-1))
    for split in range(score_THN.size(2)):
        part_THD = partials.part_THND[:, :, split].masked_fill(~sees_TN[:, split].view(-1, 1, 1), 0.0)
        out_THD = out_THD + part_THD * weight_THN[..., split, None]
        mass_TH = mass_TH + weight_THN[..., split]
    return out_THD / mass_TH.unsqueeze(-1)
