"""`Pass`: the inputs of one forward pass on the device, and their construction from the rows of a step.

A decode window has one token per row; other passes have rows of one token first, then chunks. In a deterministic pass
chunks are divided into pieces that attend like decode rows.

Shapes: T tokens of the pass, R rows or pieces of rows, B blocks per row, H heads, D head size, N splits, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nano_inference.core.step import RowState
from nano_inference.executors.cuda.launchers import AttentionKernels
from nano_inference.executors.cuda.records import Cache, Groups, Partials, Rows, States, num_splits
from nano_inference.executors.states import ends_of
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.executors.torch.store import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendPart:
    """Adjacent rows of a pass that attend with the same kernel."""

    first_token: int
    num_tokens: int
    first_row: int
    rows: Rows  # token indices relative to `first_token`
    max_queries: int
    position_T: Tensor  # of all tokens of the pass
    partials: Partials | None  # None: one pass over all keys (`attend_chunks`)
    groups: Groups | None = None

    def attend(
        self, kernels: AttentionKernels, out_THD: Tensor, q_THD: Tensor, cache: Cache, spec: AttentionSpec
    ) -> None:
        """Write the attention output of these rows' tokens."""
        own = (self.first_token, self.num_tokens)
        out_THD, q_THD = out_THD.narrow(0, *own), q_THD.narrow(0, *own)
        cache = cache._replace(table_RB=cache.table_RB.narrow(0, self.first_row, self.rows.length_R.size(0)))
        if self.partials is None:
            kernels.attend_chunks(out_THD, q_THD, cache, self.rows, spec, max_queries=self.max_queries)
            return
        if self.groups is None:
            kernels.attend_splits(self.partials, q_THD, cache, self.rows, spec, max_queries=self.max_queries)
        else:
            kernels.attend_groups(self.partials, q_THD, cache, self.rows, self.groups, spec)
        kernels.merge_splits(out_THD, self.partials, self.position_T.narrow(0, *own), spec.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Inputs of one forward pass; int32 tensors."""

    token_T: Tensor
    previous_T: Tensor  # -1: none
    position_T: Tensor  # -1: the token is not computed
    row_T: Tensor  # row of the block table of each token
    table_RB: Tensor
    store: KVStore
    parts: tuple[AttendPart, ...]
    has_windows: bool = True  # False: every token attends to all earlier keys
    states: States | None = None  # of a program with recurrent states
    most_tokens: int = 1  # of a row
    adapter_T: Tensor | None = None  # place of each token's adapter, -1: none; None if no token has one

    def state(self, index: int) -> Tensor:
        """Return the memory [Z, *shape] of a recurrent state."""
        assert self.store.states is not None
        return self.store.states.views[index]

    def cache(self, layer: int) -> Cache:
        store = self.store
        return Cache(store.k_layers[layer], store.v_layers[layer], self.table_RB, store.block_size)


class PartialMemory:
    """Owns the partial results of attention, for up to `num_rows` tokens with `num_splits` splits."""

    def __init__(self, num_rows: int, num_splits: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        self.num_rows, self.num_splits = num_rows, num_splits
        self._heads = (num_heads, head_dim)
        self._part_N = torch.zeros(num_rows * num_splits * num_heads * head_dim, dtype=torch.float32, device=device)
        self._score_N = torch.zeros(num_rows * num_splits * num_heads, dtype=torch.float32, device=device)

    def views(self, num_tokens: int, num_splits: int) -> Partials:
        assert num_tokens <= self.num_rows and num_splits <= self.num_splits
        heads, dim = self._heads
        size = num_tokens * heads * num_splits
        part_THND = self._part_N.narrow(0, 0, size * dim).view(num_tokens, heads, num_splits, dim)
        return Partials(part_THND, self._score_N.narrow(0, 0, size).view(num_tokens, heads, num_splits))


_ALIGNED, _WIDTH = 4, 16
"""Triton compiles a kernel again for an address or a stride that is not a multiple of 16 bytes or words: none is."""


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class PassRow(Protocol):
    """What a pass needs of a row (`core.step.Row` has it)."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def prev_token(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...
    @property
    def state(self) -> RowState | None: ...
    @property
    def adapter(self) -> int: ...


class TokenRow(NamedTuple):
    """A row of a pass that samples nothing."""

    tokens: tuple[int, ...]
    prev_token: int
    start: int
    blocks: tuple[int, ...]
    state: RowState | None = None
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    row: PassRow
    first: int
    num_tokens: int

    @property
    def length(self) -> int:
        """Return the number of keys that the last token sees."""
        return self.row.start + self.first + self.num_tokens


def build_pass(
    rows: Sequence[PassRow], store: KVStore, memory: PartialMemory, *, has_windows: bool, is_deterministic: bool
) -> Pass:
    """Return the pass of rows in step order (`batch.in_step_order`)."""
    pieces = list(_pieces(rows, memory.num_rows if is_deterministic else None))
    width = _padded(max(len(piece.row.blocks) for piece in pieces), _WIDTH)
    num_decode = 0 if is_deterministic else sum(len(row.tokens) == 1 for row in rows)
    token_T = np.fromiter((token for row in rows for token in row.tokens), np.int32)
    previous_T = np.fromiter((token for row in rows for token in (row.prev_token, *row.tokens[:-1])), np.int32)
    position_T = np.concatenate([np.arange(row.start, row.start + len(row.tokens), dtype=np.int32) for row in rows])
    sizes = [piece.num_tokens for piece in pieces]
    row_T = np.repeat(np.arange(len(pieces), dtype=np.int32), sizes)
    table_RB = np.zeros((len(pieces), width), np.int32)
    for index, piece in enumerate(pieces):
        table_RB[index, : len(piece.row.blocks)] = piece.row.blocks
    device = store.k_LSKD.device
    num_tokens = len(token_T)
    packed_4T = np.zeros((4, _padded(num_tokens, _ALIGNED)), np.int32)
    packed_4T[:, :num_tokens] = token_T, previous_T, position_T, row_T
    per_token_4T = torch.from_numpy(packed_4T).to(device).narrow(1, 0, num_tokens)
    parts = (
        _split_parts(pieces, memory, per_token_4T[2], device)
        if is_deterministic
        else _mixed_parts(pieces, num_decode, memory, per_token_4T[2], device)
    )
    return Pass(
        token_T=per_token_4T[0],
        previous_T=per_token_4T[1],
        position_T=per_token_4T[2],
        row_T=per_token_4T[3],
        table_RB=torch.from_numpy(table_RB).to(device),
        store=store,
        parts=tuple(parts),
        has_windows=has_windows,
        states=states_of(rows, device) if store.states else None,
        most_tokens=max(len(row.tokens) for row in rows),
    )


def states_of(rows: Sequence[PassRow], device: torch.device) -> States:
    """Return which slots the rows of a step use; a part ends at each write."""
    parts, bounds, slots, sources = [0], [0], list[int](), list[int]()
    for row in rows:
        assert row.state is not None, "a row without slots"
        first = bounds[-1]
        for end, slot in ends_of(row.state, row.start + len(row.tokens)):
            bounds.append(first + end - row.start)
            slots.append(slot)
        parts.append(len(slots))
        sources.append(row.state.source)
    lists = (parts, bounds, slots, sources)
    width = _padded(max(map(len, lists)), _ALIGNED)
    packed_4W = torch.tensor([one + [0] * (width - len(one)) for one in lists], dtype=torch.int32).to(device)
    return States(*(found_W.narrow(0, 0, len(one)) for found_W, one in zip(packed_4W, lists, strict=True)))


def _pieces(rows: Sequence[PassRow], most: int | None) -> Iterator[_Piece]:
    for row in rows:
        size = len(row.tokens) if most is None else most
        for first in range(0, len(row.tokens), size):
            yield _Piece(row, first, min(size, len(row.tokens) - first))


def _mixed_parts(
    pieces: Sequence[_Piece], num_decode: int, memory: PartialMemory, position_T: Tensor, device: torch.device
) -> Iterator[AttendPart]:
    """Yield the decode rows in groups that fit the memory, then all chunks."""
    for start in range(0, num_decode, memory.num_rows):
        some = pieces[start : min(start + memory.num_rows, num_decode)]
        yield _part(some, start, start, memory, position_T, device)
    if num_decode < len(pieces):
        yield _part(pieces[num_decode:], num_decode, num_decode, None, position_T, device)


def _split_parts(
    pieces: Sequence[_Piece], memory: PartialMemory, position_T: Tensor, device: torch.device
) -> Iterator[AttendPart]:
    """Yield pieces in groups that fit the memory: those of one token, then others, whose tiles are larger."""
    begin = token = size = 0
    for index, piece in enumerate(pieces):
        is_other = piece.num_tokens > 1 and index > begin and pieces[index - 1].num_tokens == 1
        if is_other or size + piece.num_tokens > memory.num_rows:
            yield _part(pieces[begin:index], begin, token, memory, position_T, device)
            begin, token, size = index, token + size, 0
        size += piece.num_tokens
    yield _part(pieces[begin:], begin, token, memory, position_T, device)


def _part(
    pieces: Sequence[_Piece],
    first_row: int,
    first_token: int,
    memory: PartialMemory | None,
    position_T: Tensor,
    device: torch.device,
) -> AttendPart:
    sizes = [piece.num_tokens for piece in pieces]
    lengths = [piece.length for piece in pieces]
    packed_3R = np.zeros((3, _padded(len(pieces) + 1, _ALIGNED)), np.int32)
    packed_3R[0, 1 : len(pieces) + 1] = np.cumsum(sizes)
    packed_3R[1, : len(pieces)] = lengths
    start_R, length_R, shared_R = torch.from_numpy(packed_3R).to(device).unbind(0)
    start_R, length_R, shared_R = start_R[: len(pieces) + 1], length_R[: len(pieces)], shared_R[: len(pieces)]
    partials = None if memory is None else memory.views(sum(sizes), num_splits(max(lengths)))
    return AttendPart(
        first_token=first_token,
        num_tokens=sum(sizes),
        first_row=first_row,
        rows=Rows(start_R, length_R, shared_R),
        max_queries=max(sizes),
        position_T=position_T,
        partials=partials,
    )
