"""Kernels that find a row's best tokens without sorting: the cut of top-k, top-p and min-p; top log-probabilities.

The cut is found by a search over keys (uint32 in the order of the float values), four bits at a time: each pass over
the row adds up tokens, or their masses in float64, by the next four bits among tokens that share the bits found so
far. All sums are in a fixed order, so a row's result does not depend on the batch.

Shapes: B rows, S slots, V vocabulary, N chunks, C tokens of a block, K best tokens, H = 16 values of four bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel, capped
from nano_inference.executors.cuda.kernels.sampler import PROCESSED, RAW, best_of, is_kept, key_of, scaled


@triton.jit
def sampled_keys(
    work_V: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, best: tl.tensor, temperature: tl.tensor, C: tl.constexpr
) -> tl.tensor:
    """Return (keys, values, valid) of a block of tempered logits; keys outside the vocabulary are 0."""
    id_C = start + tl.arange(0, C)
    valid_C = id_C < vocab_size
    y_C = scaled(tl.load(work_V + id_C, mask=valid_C, other=float("-inf")), best, temperature)
    return tl.where(valid_C, key_of(y_C), 0), y_C, valid_C


@triton.jit
def kth_key(
    work_V: tl.tensor,
    k: tl.tensor,
    vocab_size: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Return the k-th largest key, and how many tokens with that key are among the k best."""
    half_H = tl.arange(0, 16)
    key, known, missing = tl.zeros([], tl.uint32), tl.zeros([], tl.uint32), k
    shift = tl.full([], 28, tl.uint32)
    for _digit in range(8):
        count_H = tl.zeros([16], tl.int32)
        for start in range(0, vocab_size, C):
            key_C, _y_C, valid_C = sampled_keys(work_V, start, vocab_size, best, temperature, C)
            digit_C = tl.where(valid_C & (((key_C ^ key) & known) == 0), (key_C >> shift) & 15, 16).to(tl.int32)
            count_H += tl.sum((digit_C[None, :] == half_H[:, None]).to(tl.int32), 1)
        above_H = tl.sum(tl.where(half_H[None, :] > half_H[:, None], count_H[None, :], 0), 1)
        is_next_H = (above_H < missing) & (missing <= above_H + count_H)
        digit = tl.sum(tl.where(is_next_H, half_H, 0), 0)
        missing -= tl.sum(tl.where(is_next_H, above_H, 0), 0)
        key = key | (digit.to(tl.uint32) << shift)
        known = known | (tl.full([], 15, tl.uint32) << shift)
        shift -= 4
    return key, missing


@triton.jit
def mass_above(
    work_V: tl.tensor,
    key: tl.tensor,
    vocab_size: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Return the float64 mass of all tokens with a larger key; `top` is the largest tempered logit."""
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, C):
        key_C, y_C, valid_C = sampled_keys(work_V, start, vocab_size, best, temperature, C)
        weight_C = tl.exp(y_C.to(tl.float64) - top)
        mass += tl.sum(tl.where(valid_C & (key_C > key), weight_C, 0.0), 0)
    return mass


@triton.jit
def mass_key(
    work_V: tl.tensor,
    target: tl.tensor,
    vocab_size: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Return the largest key at which the mass of it and all larger keys reaches the target, and the mass above it."""
    half_H = tl.arange(0, 16)
    key, known, above = tl.zeros([], tl.uint32), tl.zeros([], tl.uint32), tl.zeros([], tl.float64)
    shift = tl.full([], 28, tl.uint32)
    for _digit in range(8):
        mass_H = tl.zeros([16], tl.float64)
        for start in range(0, vocab_size, C):
            key_C, y_C, valid_C = sampled_keys(work_V, start, vocab_size, best, temperature, C)
            is_open_C = valid_C & (((key_C ^ key) & known) == 0)
            if tl.max(is_open_C.to(tl.int32), 0) > 0:
                digit_C = tl.where(is_open_C, (key_C >> shift) & 15, 16).to(tl.int32)
                weight_C = tl.exp(y_C.to(tl.float64) - top)
                mass_H += tl.sum(tl.where(digit_C[None, :] == half_H[:, None], weight_C[None, :], 0.0), 1)
        above_H = above + tl.sum(tl.where(half_H[None, :] > half_H[:, None], mass_H[None, :], 0.0), 1)
        reaches_H = (mass_H > 0) & (above_H + mass_H >= target)
        lowest = tl.min(tl.where(mass_H > 0, half_H, 15), 0)  # if rounding leaves none
        digit = tl.maximum(tl.max(tl.where(reaches_H, half_H, -1), 0), lowest)
        above = tl.sum(tl.where(half_H == digit, above_H, 0.0), 0)
        key = key | (digit.to(tl.uint32) << shift)
        known = known | (tl.full([], 15, tl.uint32) << shift)
        shift -= 4
    return key, above


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """Return the float32 value of a key."""
    bits = tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def last_of_equals(
    work_V: tl.tensor,
    key: tl.tensor,
    count: tl.tensor,
    vocab_size: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Return the id of the count-th token with this key, in ascending order of ids; `vocab_size` if there is none."""
    last, seen = vocab_size, tl.zeros([], tl.int32)
    for start in range(0, vocab_size, C):
        key_C, _y_C, valid_C = sampled_keys(work_V, start, vocab_size, best, temperature, C)
        is_equal_C = (valid_C & (key_C == key)).to(tl.int32)
        rank_C = seen + tl.cumsum(is_equal_C, 0)
        is_last_C = (is_equal_C > 0) & (rank_C == count)
        last = tl.minimum(last, tl.min(tl.where(is_last_C, start + tl.arange(0, C), vocab_size), 0))
        seen += tl.sum(is_equal_C, 0)
    return last


@triton.jit
def least_key(min_p: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return the smallest key whose value y has e^(y - top) >= min_p: a guess, then the neighbouring floats."""
    guess = key_of((top + tl.log(min_p)).to(tl.float32))
    key_8 = guess - 4 + tl.arange(0, 8).to(tl.uint32)
    is_kept_8 = tl.exp(value_of(key_8).to(tl.float64) - top) >= min_p
    return tl.min(tl.where(is_kept_8, key_8.to(tl.int64), 4294967295), 0)


@triton.jit
def cut_row(
    work_BV: tl.tensor,
    best_BN: tl.tensor,
    cut_key_B: tl.tensor,
    cut_id_B: tl.tensor,
    slot_B: tl.tensor,
    temperature_S: tl.tensor,
    top_k_S: tl.tensor,
    top_p_S: tl.tensor,
    min_p_S: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    C: tl.constexpr,
    NP: tl.constexpr,
) -> None:
    """Write which tokens truncation keeps: those with a larger key, and equal ones up to an id. Grid: (B,)."""
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_B + row).to(tl.int64)
    temperature = tl.load(temperature_S + slot)
    top_k, top_p, min_p = tl.load(top_k_S + slot), tl.load(top_p_S + slot), tl.load(min_p_S + slot)
    best = best_of(best_BN, row, num_chunks, NP)
    work_V = work_BV + row * vocab_size
    cut_key, cut_id = tl.zeros([], tl.int64), vocab_size
    is_active = (temperature != 0.0) & (tl.abs(best) < float("inf"))
    top = scaled(tl.full([1], 0.0, tl.float32) + best, best, temperature)
    top = tl.sum(top.to(tl.float64), 0)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if is_active & (has_top_k | (top_p < 1.0)):
        key, count = tl.zeros([], tl.uint32), vocab_size
        if has_top_k:
            key, count = kth_key(work_V, top_k, vocab_size, best, temperature, C)
        if top_p < 1.0:
            total = mass_above(work_V, key, vocab_size, best, temperature, top, C)
            if has_top_k:
                total += count.to(tl.float64) * tl.exp(value_of(key).to(tl.float64) - top)
            bound = count
            p_key, above = mass_key(work_V, top_p * total, vocab_size, best, temperature, top, C)
            weight = tl.exp(value_of(p_key).to(tl.float64) - top)
            wanted = tl.ceil((top_p * total - above) / weight)
            wanted = tl.minimum(tl.maximum(wanted, 1.0), vocab_size.to(tl.float64)).to(tl.int32)
            count = tl.where(p_key == key, tl.minimum(wanted, bound), wanted)
            key = p_key
        cut_key = key.to(tl.int64)
        cut_id = last_of_equals(work_V, key, count, vocab_size, best, temperature, C)
    if is_active & (min_p > 0.0):
        least = least_key(min_p, top)
        cut_id = tl.where(least > cut_key, vocab_size, cut_id)
        cut_key = tl.maximum(least, cut_key)
    tl.store(cut_key_B + row, cut_key)
    tl.store(cut_id_B + row, cut_id)


@triton.jit
def top_row(
    logits_BV: tl.tensor,
    work_BV: tl.tensor,
    normaliser_B5: tl.tensor,
    cut_key_B: tl.tensor,
    cut_id_B: tl.tensor,
    slot_B: tl.tensor,
    temperature_S: tl.tensor,
    report_S: tl.tensor,
    num_tops_S: tl.tensor,
    top_id_BK: tl.tensor,
    top_logprob_BK: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    cap: tl.tensor,
    C: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_CUT: tl.constexpr,
) -> None:
    """Write a row's most probable tokens in descending order, lowest id first among equals; then ids -1. Grid: (B,).

    Each pass finds the largest (key, -id) below the last one found.
    """
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_B + row).to(tl.int64)
    temperature, report = tl.load(temperature_S + slot), tl.load(report_S + slot) % 4
    is_raw = report == RAW
    best = tl.load(normaliser_B5 + row * 5)
    log_mass = tl.load(normaliser_B5 + row * 5 + tl.where(is_raw, 4, tl.where(report == PROCESSED, 2, 1)))
    shift = tl.load(normaliser_B5 + row * 5 + tl.where(is_raw, 3, 0))
    divisor = tl.where(is_raw | (temperature == 0.0), 1.0, tl.maximum(temperature, 1e-30)).to(tl.float64)
    cut_key, cut_id = tl.load(cut_key_B + row), tl.load(cut_id_B + row)
    last = tl.full([], 9223372036854775807, tl.int64)
    num_tops = tl.where(tl.abs(log_mass) < float("inf"), tl.minimum(tl.load(num_tops_S + slot), width), 0)
    for place in range(width):
        found = tl.full([], -1, tl.int64)
        if place < num_tops:
            for start in range(0, vocab_size, C):
                id_C = start + tl.arange(0, C)
                valid_C = id_C < vocab_size
                if is_raw:
                    x_C = tl.load(logits_BV + row * stride + id_C, mask=valid_C, other=0.0).to(tl.float32)
                    if HAS_CAP:
                        x_C = capped(x_C, cap)
                else:
                    x_C = tl.load(work_BV + row * vocab_size + id_C, mask=valid_C, other=0.0)
                if HAS_CUT:
                    kept_C = is_kept(x_C, id_C, best.to(tl.float32), temperature, cut_key, cut_id)
                    valid_C = valid_C & (kept_C | (report != PROCESSED))
                code_C = key_of(tl.where(x_C == 0.0, 0.0, x_C)).to(tl.int64) * 1048576 + (1048575 - id_C)
                found = tl.maximum(found, tl.max(tl.where(valid_C & (code_C < last), code_C, -1), 0))
        last = found
        x = value_of((tl.maximum(found, 0) // 1048576).to(tl.uint32)).to(tl.float64)
        logprob = ((x - shift) / divisor - log_mass).to(tl.float32)
        is_found = (found >= 0) & (logprob > float("-inf"))
        tl.store(top_id_BK + row * width + place, tl.where(is_found, 1048575 - found % 1048576, -1).to(tl.int32))
        tl.store(top_logprob_BK + row * width + place, logprob)
