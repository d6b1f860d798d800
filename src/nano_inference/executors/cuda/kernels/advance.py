"""The kernels that begin and end a decode step: from slots to the inputs of the model, and from draws to slots.

Shapes: B rows, S slots, K entries of a slot's ring, X stop tokens of a slot, P rows of the count table, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel

RUNNING, STOPPED, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_rows(
    slot_B: tl.tensor,
    token_S: tl.tensor,
    previous_S: tl.tensor,
    position_S: tl.tensor,
    state_S: tl.tensor,
    token_B: tl.tensor,
    previous_B: tl.tensor,
    position_B: tl.tensor,
    length_B: tl.tensor,
    num_rows: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Write the inputs of each row's step; position -1 and length 0 if the slot is not running. Grid: (rows / C,)."""
    begin_kernel()
    row_C = tl.program_id(0) * C + tl.arange(0, C)
    valid_C = row_C < num_rows
    slot_C = tl.load(slot_B + row_C, mask=valid_C, other=0).to(tl.int64)
    runs_C = tl.load(state_S + slot_C, mask=valid_C, other=1) == RUNNING
    position_C = tl.where(runs_C, tl.load(position_S + slot_C, mask=valid_C, other=0), -1)
    tl.store(token_B + row_C, tl.load(token_S + slot_C, mask=valid_C, other=0), mask=valid_C)
    tl.store(previous_B + row_C, tl.load(previous_S + slot_C, mask=valid_C, other=-1), mask=valid_C)
    tl.store(position_B + row_C, position_C, mask=valid_C)
    tl.store(length_B + row_C, position_C + 1, mask=valid_C)


@triton.jit
def advance_rows(
    token_B: tl.tensor,
    logprob_B: tl.tensor,
    slot_B: tl.tensor,
    token_S: tl.tensor,
    previous_S: tl.tensor,
    position_S: tl.tensor,
    num_new_S: tl.tensor,
    max_tokens_S: tl.tensor,
    state_S: tl.tensor,
    stop_SX: tl.tensor,
    count_row_S: tl.tensor,
    count_PV: tl.tensor,
    ring_token_SK: tl.tensor,
    ring_logprob_SK: tl.tensor,
    num_rows: tl.tensor,
    num_stops: tl.tensor,
    vocab_size: tl.tensor,
    ring_size: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Append running rows' tokens and log-probabilities to their slots' rings; update the slots. Grid: (rows / C,)."""
    begin_kernel()
    row_C = tl.program_id(0) * C + tl.arange(0, C)
    valid_C = row_C < num_rows
    slot_C = tl.load(slot_B + row_C, mask=valid_C, other=0).to(tl.int64)
    runs_C = valid_C & (tl.load(state_S + slot_C, mask=valid_C, other=1) == RUNNING)
    token_C = tl.load(token_B + row_C, mask=runs_C, other=0)
    num_new_C = tl.load(num_new_S + slot_C, mask=runs_C, other=0)
    at_C = slot_C * ring_size + num_new_C % ring_size
    tl.store(ring_token_SK + at_C, token_C, mask=runs_C)
    tl.store(ring_logprob_SK + at_C, tl.load(logprob_B + row_C, mask=runs_C, other=0.0), mask=runs_C)
    is_stop_C = tl.zeros([C], tl.int32)
    for index in range(num_stops):
        stop_C = tl.load(stop_SX + slot_C * num_stops + index, mask=runs_C, other=-1)
        is_stop_C = tl.where(stop_C == token_C, 1, is_stop_C)
    is_full_C = num_new_C + 1 >= tl.load(max_tokens_S + slot_C, mask=runs_C, other=0)
    state_C = tl.where(is_stop_C > 0, STOPPED, tl.where(is_full_C, FULL, RUNNING))
    tl.store(previous_S + slot_C, tl.load(token_S + slot_C, mask=runs_C, other=0), mask=runs_C)
    tl.store(token_S + slot_C, token_C, mask=runs_C)
    tl.store(position_S + slot_C, tl.load(position_S + slot_C, mask=runs_C, other=0) + 1, mask=runs_C)
    tl.store(num_new_S + slot_C, num_new_C + 1, mask=runs_C)
    tl.store(state_S + slot_C, state_C, mask=runs_C)
    count_row_C = tl.load(count_row_S + slot_C, mask=runs_C, other=-1).to(tl.int64)
    counts_C = runs_C & (count_row_C >= 0)
    at_C = count_PV + count_row_C * vocab_size + token_C
    tl.store(at_C, tl.load(at_C, mask=counts_C, other=0) + 2, mask=counts_C)
