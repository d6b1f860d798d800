"""The reference backend: gathers blocks, then calls torch's scaled dot product attention. Runs on every device.

Decode rows (one token) are gathered in groups of similar length; prefill chunks are computed one by one. In decode, the
query heads of one kv head take the query dimension, so that K/V is read once per kv head.

Shapes: T tokens of the step, H heads, K kv heads, D head size, G rows of a group, M blocks per row, S keys per row,
P query heads per kv head, Q queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano_inference.executors.step_input import ForwardInput, Span
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.executors.torch.attention.masks import create_attention_mask
from nano_inference.executors.torch.store import KVStore

_GROUP_ROWS = 16
_GROUP_SLACK = 1.25
"""Largest ratio between the longest and the shortest row of a group; a difference of one block is always allowed."""
SCORE_ELEMENTS = 1 << 24  # largest number of soft-capped scores in memory at a time


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that are gathered together."""

    tokens: slice  # their range among the step's tokens
    block_GM: Tensor
    hidden_G11S: Tensor | None
    """Additive mask: 0 for visible keys, -inf for others; None if every row sees every gathered key."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens."""

    span: Span
    block_M: Tensor
    skip: int  # number of gathered keys before the first visible one
    mask_QS: Tensor | None  # None if the chunk starts its sequence and fits the window: plain causal attention


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """A step's rows as decode groups and chunks, for one window size."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class SdpaBackend:
    """Attention over gathered blocks; satisfies `Backend`."""

    def __init__(self, score_elements: int = SCORE_ELEMENTS) -> None:
        """`score_elements`: largest number of soft-capped scores in memory at a time."""
        self._score_elements = score_elements

    def plan(self, step: ForwardInput, block_size: int, window: int | None) -> SdpaPlan:
        """Group the rows and build their block indices and masks."""
        device = step.token_T.device
        singles = [span for span in step.spans if span.num_tokens == 1]
        assert all(span.offset == i for i, span in enumerate(singles)), "rows of one token must come first"
        return SdpaPlan(
            tuple(_decode_group(g, block_size, window, device) for g in _similar(singles, block_size, window)),
            tuple(_chunk(s, block_size, window, device) for s in step.spans if s.num_tokens > 1),
        )

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        store: KVStore,
        layer: int,
        spec: AttentionSpec,
        plan: SdpaPlan,
    ) -> Tensor:
        """Compute each group and each chunk; see `Backend.attend`."""
        if len(plan.groups) == 1 and not plan.chunks:
            return _attend_group(q_THD, store, layer, spec, plan.groups[0])
        out_THD = q_THD.new_empty(q_THD.shape)
        for group in plan.groups:
            out_THD[group.tokens] = _attend_group(q_THD[group.tokens], store, layer, spec, group)
        for chunk in plan.chunks:
            rows = slice(chunk.span.offset, chunk.span.offset + chunk.span.num_tokens)
            k_SKD, v_SKD = k_TKD[rows], v_TKD[rows]
            if chunk.mask_QS is not None:
                keys = slice(chunk.skip, chunk.skip + chunk.mask_QS.size(1))
                k_1SKD, v_1SKD = _gather(store, layer, chunk.block_M[None])
                k_SKD, v_SKD = k_1SKD[0, keys], v_1SKD[0, keys]
            out_THD[rows] = _attend_chunk(q_THD[rows], k_SKD, v_SKD, spec, chunk.mask_QS, self._score_elements)
        return out_THD


def _num_visible(span: Span, window: int | None) -> int:
    return span.end if window is None else min(span.end, window)


def _similar(spans: Sequence[Span], block_size: int, window: int | None) -> list[list[Span]]:
    """Split rows sorted by length into groups of similar length."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and len(groups[-1]) < _GROUP_ROWS:
            shortest = _num_visible(groups[-1][0], window)
            if _num_visible(span, window) <= max(shortest * _GROUP_SLACK, shortest + block_size):
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


def _decode_group(spans: Sequence[Span], block_size: int, window: int | None, device: torch.device) -> DecodeGroup:
    """Pad the rows' block tables to equal width and mask the keys outside each row's range."""
    firsts = [span.end - _num_visible(span, window) for span in spans]
    tables = [
        span.blocks[first // block_size : -(-span.end // block_size)] for span, first in zip(spans, firsts, strict=True)
    ]
    width = max(map(len, tables))
    block_GM = torch.tensor([[*table, *[table[-1]] * (width - len(table))] for table in tables], device=device)
    low_G1 = torch.tensor([[first % block_size] for first in firsts], device=device)
    high_G1 = torch.tensor(
        [[span.end - first // block_size * block_size] for span, first in zip(spans, firsts, strict=True)],
        device=device,
    )
    slot_S = torch.arange(width * block_size, device=device)
    seen_GS = (slot_S >= low_G1) & (slot_S < high_G1)
    hidden_G11S = None
    if not bool(seen_GS.all()):
        hidden_G11S = torch.zeros(seen_GS.shape, device=device).masked_fill_(~seen_GS, -torch.inf)[:, None, None]
    return DecodeGroup(slice(spans[0].offset, spans[-1].offset + 1), block_GM, hidden_G11S)


def _chunk(span: Span, block_size: int, window: int | None, device: torch.device) -> Chunk:
    """Return a chunk's visible blocks, with a mask unless attention is plainly causal."""
    first = 0 if window is None else max(0, span.start + 1 - window)
    first_block = first // block_size
    block_M = torch.tensor(span.blocks[first_block : -(-span.end // block_size)], device=device)
    mask_QS = None
    if span.start or (window is not None and window < span.end):
        query_Q = torch.arange(span.start, span.end, device=device)
        mask_QS = create_attention_mask(query_Q, torch.arange(first, span.end, device=device), window)
    return Chunk(span, block_M, first - first_block * block_size, mask_QS)


def _gather(store: KVStore, layer: int, block_GM: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = block_GM.shape
    num_kv_heads, head_dim = store.k_LSKD.shape[2:]
    shape = (num_rows, width * store.block_size, num_kv_heads, head_dim)
    k_NB, v_NB = store.blocks(layer)
    flat = block_GM.flatten()
    return k_NB.index_select(0, flat).view(shape), v_NB.index_select(0, flat).view(shape)


def _attend_group(q_GHD: Tensor, store: KVStore, layer: int, spec: AttentionSpec, group: DecodeGroup) -> Tensor:
    """Attend for decode rows; the query heads of a kv head take the query dimension."""
    k_GSKD, v_GSKD = _gather(store, layer, group.block_GM)
    q_GKPD = q_GHD.reshape(q_GHD.size(0), k_GSKD.size(2), -1, q_GHD.size(2))
    out_GKPD = _attend(q_GKPD, k_GSKD.transpose(1, 2), v_GSKD.transpose(1, 2), spec, group.hidden_G11S)
    return out_GKPD.flatten(1, 2)


def _attend_chunk(
    q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, spec: AttentionSpec, mask_QS: Tensor | None, score_elements: int
) -> Tensor:
    q_HQD, k_KSD, v_KSD = (x.transpose(0, 1)[None] for x in (q_QHD, k_SKD, v_SKD))
    if spec.softcap is None:
        out_HQD = scaled_dot_product_attention(
            q_HQD, k_KSD, v_KSD, attn_mask=mask_QS, is_causal=mask_QS is None, scale=spec.scale, enable_gqa=True
        )
        return out_HQD[0].transpose(0, 1)
    if mask_QS is None:
        position_Q = torch.arange(q_QHD.size(0), device=q_QHD.device)
        mask_QS = create_attention_mask(position_Q, position_Q)
    hidden_QS = torch.zeros(mask_QS.shape, device=mask_QS.device).masked_fill_(~mask_QS, -torch.inf)
    num_queries, num_heads, head_dim = q_QHD.shape
    q_KPQD = q_QHD.transpose(0, 1).reshape(k_SKD.size(1), -1, num_queries, head_dim)
    k_K1SD, v_K1SD = k_KSD[0][:, None], v_KSD[0][:, None]
    width = max(1, score_elements // (num_heads * k_SKD.size(0)))
    parts = [
        _attend_softcapped(q_KPQD[:, :, i : i + width], k_K1SD, v_K1SD, spec, hidden_QS[i : i + width])
        for i in range(0, num_queries, width)
    ]
    return torch.cat(parts, dim=2).flatten(0, 1).transpose(0, 1)


def _attend(q_GKPD: Tensor, k_GKSD: Tensor, v_GKSD: Tensor, spec: AttentionSpec, hidden_G11S: Tensor | None) -> Tensor:
    if spec.softcap is not None:
        return _attend_softcapped(q_GKPD, k_GKSD, v_GKSD, spec, hidden_G11S)
    if hidden_G11S is not None:
        hidden_G11S = hidden_G11S.to(q_GKPD.dtype)
    return scaled_dot_product_attention(q_GKPD, k_GKSD, v_GKSD, attn_mask=hidden_G11S, scale=spec.scale)


def _attend_softcapped(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, hidden: Tensor | None) -> Tensor:
    """Attend with scores cap·tanh(score/cap), which SDPA does not support: [..., Q, D] x [..., S, D] -> [..., Q, D]."""
    assert spec.softcap is not None
    score = (q.float() @ k.float().transpose(-1, -2)) * spec.scale
    score = torch.tanh(score / spec.softcap) * spec.softcap
    if hidden is not None:
        score = score + hidden
    return (torch.softmax(score, dim=-1) @ v.float()).to(q.dtype)
