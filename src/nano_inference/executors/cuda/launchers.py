"""What the step code of a CUDA executor calls: six groups of launchers, by Triton or in plain torch.

Signatures are those of `kernels`, where the contracts are; every launcher writes its results to its arguments.

Shapes: T tokens of the step, R rows, H heads, J kv heads, D head size, S slots, W width of a buffer, V vocabulary or
rows of a table, L positions, F rotary size / 2, N outputs and K inputs of a matrix, Z ranges of inputs or slots of
states, B rows, C channels, J = taps - 1, X key size.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nano_inference.executors.cuda.records import (
    Cache,
    Groups,
    HeadNorms,
    LowRankStack,
    NewHeads,
    Partials,
    RangeMemory,
    Rows,
    States,
    SumNorm,
)
from nano_inference.executors.cuda.sample_records import Scratch, Slots, Tables
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.models.ops import Activation, TablePart, TableRows


class AttentionKernels(Protocol):
    """Attention over a paged cache: decode in splits, prefill in chunks."""

    def attend_splits(
        self,
        out: Partials,
        q_THD: Tensor,
        cache: Cache,
        rows: Rows,
        spec: AttentionSpec,
        *,
        max_queries: int = 1,
    ) -> None:
        """Write the partial results of every split that each token sees."""

    def attend_groups(
        self, out: Partials, q_THD: Tensor, cache: Cache, rows: Rows, groups: Groups, spec: AttentionSpec
    ) -> None:
        """Write the partial results of every split, those that rows share by tiles. All rows have one token."""

    def merge_splits(self, out_THD: Tensor, partials: Partials, position_T: Tensor, window: int | None) -> None:
        """Write the attention output of each token from its partial results; none at negative positions."""

    def attend_rows(
        self,
        out_THD: Tensor,
        partials: Partials,
        heads: NewHeads,
        position_T: Tensor,
        cache: Cache,
        spec: AttentionSpec,
        done_I: Tensor,
    ) -> None:
        """Rotate, store and attend for tokens that each are a row: `rotate_and_store`, splits and merge."""

    def attend_chunks(
        self, out_THD: Tensor, q_THD: Tensor, cache: Cache, rows: Rows, spec: AttentionSpec, *, max_queries: int
    ) -> None:
        """Write the attention output of every token."""


class OperationKernels(Protocol):
    """The operations of `models.ops` on rows of values."""

    def norm(
        self,
        out_TW: Tensor,
        x_TW: Tensor,
        weight_W: Tensor | None,
        *,
        eps: float,
        offset: float = 0.0,
        more_TW: Tensor | None = None,
        sum_TW: Tensor | None = None,
    ) -> None:
        """Write the norm of x to out; with `more` and `sum`: x + more to sum, and its norm to out."""

    def rotate_and_store(
        self,
        q_THD: Tensor,
        qkv_TW: Tensor,
        cos_LF: Tensor | None,
        sin_LF: Tensor | None,
        position_T: Tensor,
        row_T: Tensor,
        cache: Cache,
        norms: HeadNorms,
    ) -> None:
        """Write normalised and rotated queries, and keys and values to the cache; none at negative positions."""

    def activate(self, out_TW: Tensor, gate_TW: Tensor, up_TW: Tensor | None, kind: Activation) -> None:
        """Write act(gate) · up, or relu(gate)²."""

    def mix(self, out_TW: Tensor, x_TW: Tensor, y_TW: Tensor, a_1: Tensor | None, b_1: Tensor, sign: int) -> None:
        """Write a · x + sign · b · y."""

    def gate_values(self, v_TW: Tensor, gate_TJ: Tensor, more_TW: Tensor, head_dim: int, scale: float) -> None:
        """Add scale · sigmoid(gate) · more to v in place."""

    def smear(self, x_TW: Tensor, gate_T1: Tensor, before_TW: Tensor, share_1: Tensor, previous_T: Tensor) -> None:
        """Add share · sigmoid(gate) · before to x in place, for tokens with a previous token."""

    def softcap(self, x_TW: Tensor, cap: float) -> None:
        """Replace x by cap · tanh(x / cap)."""

    def embed(
        self,
        out_TW: Tensor,
        table_VW: Tensor,
        token_T: Tensor,
        previous_T: Tensor,
        rows: TableRows = "token",
        scale: float = 1.0,
        part: TablePart | None = None,
    ) -> None:
        """Write scaled rows of a table; zeros for rows that are not in `part`."""


class StateKernels(Protocol):
    """Operations with a recurrent state of each row, and those of their layers."""

    def convolve(
        self,
        out_TC: Tensor,
        x_TC: Tensor,
        weight_C1K: Tensor,
        state_ZJC: Tensor,
        states: States,
        position_T: Tensor,
        *,
        most_tokens: int,
    ) -> None:
        """Write the causal convolution and the states after parts of rows; none at negative positions."""

    def gated_delta(
        self,
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
        """Write the gated delta rule and the states after parts of rows; none at negative positions."""

    def gated_norm(self, out_TW: Tensor, x_TW: Tensor, gate_TW: Tensor, weight_V: Tensor, eps: float) -> None:
        """Write weight · norm(x) · silu(gate) of each head."""

    def gate(self, out_TW: Tensor, x_TW: Tensor, gate_TW: Tensor) -> None:
        """Write x · sigmoid(gate)."""

    def arrange(self, out_TW: Tensor, x_TW: Tensor, column_W: Tensor) -> None:
        """Write x[:, column] for each column of out."""


class ProductKernels(Protocol):
    """The matrix product whose sums have the same order for any number of rows."""

    def multiply(
        self, out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, memory: RangeMemory
    ) -> None:
        """Write x Wᵀ + bias."""

    def multiply_norm(
        self,
        out_TN: Tensor,
        norm: SumNorm,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        kind: Activation | None,
        memory: RangeMemory,
    ) -> None:
        """Write a sum, and the product of its norm, or its activation: `norm`, `multiply` and `activate`."""


class AdapterKernels(Protocol):
    """What the adapters of rows add to a projection."""

    def add_adapters(self, out_TN: Tensor, x_TK: Tensor, stack: LowRankStack, index_T: Tensor) -> None:
        """Add s · (x Aᵀ) Bᵀ to the outputs of each token; `index_T` are the places of adapters, negative for none."""


class SamplingKernels(Protocol):
    """Both ends of a decode step: from slots to the inputs of the model, and from logits to slots."""

    def load(
        self, slot_B: Tensor, slots: Slots, token_B: Tensor, previous_B: Tensor, position_B: Tensor, length_B: Tensor
    ) -> None:
        """Write the inputs of a decode step; position -1 and length 0 for slots that are not running."""

    def adjust(
        self,
        out: Scratch,
        logits_BV: Tensor,
        slot_B: Tensor,
        slots: Slots,
        tables: Tables,
        softcap: float | None = None,
    ) -> None:
        """Write the logits after soft cap, penalties, bias, masks and bans."""

    def cut(self, out: Scratch, slot_B: Tensor, slots: Slots) -> None:
        """Find which tokens top-k, top-p and min-p keep in each row; call after `adjust`."""

    def draw(
        self,
        out: Scratch,
        logits_BV: Tensor,
        slot_B: Tensor,
        slots: Slots,
        *,
        has_cut: bool,
        softcap: float | None = None,
    ) -> None:
        """Draw each row's token at its uniform and compute its log-probabilities; call after `adjust`."""

    def tops(
        self,
        out: Scratch,
        logits_BV: Tensor,
        slot_B: Tensor,
        slots: Slots,
        *,
        has_cut: bool,
        softcap: float | None = None,
    ) -> None:
        """Write each row's most probable tokens in its mode; call after `draw`."""

    def advance(
        self,
        drawn: Scratch,
        slot_B: Tensor,
        slots: Slots,
        tables: Tables,
        ring_token_SK: Tensor,
        ring_logprob_SK: Tensor,
    ) -> None:
        """Append the drawn tokens of running slots to their rings, and update the slots."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of all launchers."""

    attend: AttentionKernels
    operate: OperationKernels
    multiply: ProductKernels
    recur: StateKernels
    adapt: AdapterKernels
    sample: SamplingKernels
    has_fixed_heads: bool = True  # attention supports `records.RATIOS` and `records.HEAD_DIMS` only


def triton_kernels() -> Kernels:
    """Return the Triton kernels. Raises `ValueError` if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("CUDA kernels need Triton: pip install 'nano-inference[cuda]'")
    from nano_inference.executors.cuda.kernels import adapt, attend, multiply, operate, recur, sample

    return Kernels(attend, operate, multiply, recur, adapt, sample)
