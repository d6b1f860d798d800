"""FlexAttention over gathered blocks: an option on CUDA, and an independent check of the window masks on a CPU.

The keys of all rows are concatenated; a block mask restricts each query to its own row and window. On CUDA the kernel
is compiled; on a CPU torch's unfused implementation runs, which is slow and needs no compiler.

Shapes: T tokens of the step, S gathered keys of all rows, H heads, K kv heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.executors.torch.store import KVStore


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """The slots of all rows' keys, and the mask of visible keys."""

    slot_S: Tensor
    block_mask: BlockMask


class FlexAttentionBackend:
    """Attention with torch's flex_attention; satisfies `Backend`. Owns the compiled kernel, if any."""

    def __init__(self, *, compile_kernel: bool = False) -> None:
        plain: Callable[..., Any] = cast(Any, flex_attention)
        self._flex = torch.compile(plain, dynamic=True) if compile_kernel else plain

    def plan(self, step: ForwardInput, block_size: int, window: int | None) -> FlexPlan:
        """Concatenate all rows' keys and build the block mask."""
        device = step.token_T.device
        slots: list[int] = []
        key_rows: list[int] = []
        key_positions: list[int] = []
        query_rows: list[int] = []
        for row, span in enumerate(step.spans):
            for position in range(span.end):
                slots.append(span.blocks[position // block_size] * block_size + position % block_size)
            key_rows += [row] * span.end
            key_positions += range(span.end)
            query_rows += [row] * span.num_tokens
        key_row_S = torch.tensor(key_rows, device=device)
        key_position_S = torch.tensor(key_positions, device=device)
        query_row_T = torch.tensor(query_rows, device=device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = step.position_T[query] - key_position_S[key]
            visible = (query_row_T[query] == key_row_S[key]) & (distance >= 0)
            return visible if window is None else visible & (distance < window)

        mask = create_block_mask(sees, None, None, len(query_rows), len(slots), device=str(device))
        return FlexPlan(torch.tensor(slots, device=device), mask)

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        store: KVStore,
        layer: int,
        spec: AttentionSpec,
        plan: FlexPlan,
    ) -> Tensor:
        """Gather every row's keys and attend in one call."""
        k_SKD = store.k_layers[layer].index_select(0, plan.slot_S)
        v_SKD = store.v_layers[layer].index_select(0, plan.slot_S)

        def softcap(score: Tensor, *_: Tensor) -> Tensor:
            assert spec.softcap is not None
            return torch.tanh(score / spec.softcap) * spec.softcap

        with warnings.catch_warnings():  # torch warns that the unfused implementation is slow
            warnings.simplefilter("ignore")
            out_HTD: Tensor = self._flex(
                q_THD.transpose(0, 1)[None],
                k_SKD.transpose(0, 1)[None],
                v_SKD.transpose(0, 1)[None],
                score_mod=softcap if spec.softcap is not None else None,
                block_mask=plan.block_mask,
                scale=spec.scale,
                enable_gqa=True,
            )
        return out_HTD[0].transpose(0, 1)
