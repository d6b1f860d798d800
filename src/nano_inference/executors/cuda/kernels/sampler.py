"""Kernels that turn logits into a token and its log-probability (`sampling` is the reference).

Over chunks of the vocabulary, `adjust_chunk` writes adjusted logits, their maxima and masses; `draw_row` inverts the
CDF in ascending order of ids. If rows truncate, `select.cut_row` finds which tokens are kept, and `sum_chunk` their
masses. Masses and log-sum-exps are float64:

    log-probability = (x - best) / T - log Σ e^((x - best) / T),   rounded to float32 once.

Shapes: B rows, S slots, V vocabulary, N chunks of C tokens, P rows of the tables of penalties, biases or masks, X stop
tokens of a slot, W = V / 32 words of a mask. Normalisers: the best logit, the log masses of all and of kept tokens, and
the unmodified logits' best and log mass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nano_inference.executors.cuda.kernels.language import begin_kernel, capped, mix64

RAW, TEMPERED, PROCESSED, WANTS_RAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def penalised(
    x_C: tl.tensor, count_C: tl.tensor, repetition: tl.tensor, presence: tl.tensor, frequency: tl.tensor
) -> tl.tensor:
    """Return penalised logits; `count` is twice the occurrences in the output, plus one if the prompt has the token."""
    divided_C = tl.where(x_C > 0, tl.div_rn(x_C, repetition), x_C * repetition)
    x_C = tl.where(count_C > 0, divided_C, x_C)
    output_C = count_C >> 1
    return tl.where(output_C > 0, x_C - (presence + frequency * output_C.to(tl.float32)), x_C)


@triton.jit
def biased(x_C: tl.tensor, row: tl.tensor, bias_PV: tl.tensor, vocab_size: tl.tensor, id_C: tl.tensor) -> tl.tensor:
    """Return logits with a row of biases added, of which -inf forbids its token; unchanged if `row` is negative."""
    if row >= 0:
        bias_C = tl.load(bias_PV + row * vocab_size + id_C, mask=id_C < vocab_size, other=0.0)
        x_C = tl.where(bias_C == float("-inf"), float("-inf"), x_C + bias_C)
    return x_C


@triton.jit
def masked(
    x_C: tl.tensor, row: tl.tensor, mask_PW: tl.tensor, num_words: tl.tensor, vocab_size: tl.tensor, id_C: tl.tensor
) -> tl.tensor:
    """Return logits of the tokens whose bits are set in a row of masks, else -inf; unchanged if `row` is negative."""
    if row >= 0:
        word_C = tl.load(mask_PW + row * num_words + id_C // 32, mask=id_C < vocab_size, other=0)
        x_C = tl.where(((word_C >> (id_C % 32)) & 1) != 0, x_C, float("-inf"))
    return x_C


@triton.jit
def divisor_of(temperature: tl.tensor) -> tl.tensor:
    """Return what logits are divided by, float64; temperature 0 counts as 1."""
    return tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, 1e-30)).to(tl.float64)


@triton.jit
def relative_mass(x_C: tl.tensor, best: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Return Σ e^((x - best) · inverse), float64; 0 if there is no token, where `best` is -inf."""
    shift = tl.where(best == float("-inf"), 0.0, best).to(tl.float64)
    return tl.sum(tl.exp((x_C.to(tl.float64) - shift) * inverse), 0)


@triton.jit
def store_mass(best: tl.tensor, mass: tl.tensor, x_C: tl.tensor, inverse: tl.tensor) -> None:
    """Write the largest logit and the mass relative to it to two pointers."""
    largest = tl.max(x_C, 0)
    tl.store(best, largest)
    tl.store(mass, relative_mass(x_C, largest, inverse))


@triton.jit
def adjust_chunk(
    logits_BV: tl.tensor,
    work_BV: tl.tensor,
    best_BN: tl.tensor,
    mass_BN: tl.tensor,
    raw_best_BN: tl.tensor,
    raw_mass_BN: tl.tensor,
    slot_B: tl.tensor,
    temperature_S: tl.tensor,
    report_S: tl.tensor,
    repetition_S: tl.tensor,
    presence_S: tl.tensor,
    frequency_S: tl.tensor,
    count_row_S: tl.tensor,
    bias_row_S: tl.tensor,
    mask_row_S: tl.tensor,
    min_tokens_S: tl.tensor,
    num_new_S: tl.tensor,
    stop_SX: tl.tensor,
    count_PV: tl.tensor,
    bias_PV: tl.tensor,
    mask_PW: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_stops: tl.tensor,
    num_words: tl.tensor,
    cap: tl.tensor,
    C: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> None:
    """Write one chunk's adjusted logits, their maximum, and their mass relative to it. Grid: (B, N).

    Maximum and mass of the unmodified logits, too, if the row reports them.
    """
    begin_kernel()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, slot = row * tl.num_programs(1) + chunk, tl.load(slot_B + row).to(tl.int64)
    id_C = chunk * C + tl.arange(0, C)
    valid_C = id_C < vocab_size
    x_C = tl.load(logits_BV + row * stride + id_C, mask=valid_C, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        x_C = tl.where(valid_C, capped(x_C, cap), float("-inf"))
    report = tl.load(report_S + slot)
    if (report == RAW) | (report >= WANTS_RAW):
        store_mass(raw_best_BN + at, raw_mass_BN + at, x_C, 1.0)
    counts = tl.load(count_row_S + slot).to(tl.int64)
    if counts >= 0:
        count_C = tl.load(count_PV + counts * vocab_size + id_C, mask=valid_C, other=0)
        repetition = tl.load(repetition_S + slot)
        x_C = penalised(x_C, count_C, repetition, tl.load(presence_S + slot), tl.load(frequency_S + slot))
    x_C = biased(x_C, tl.load(bias_row_S + slot).to(tl.int64), bias_PV, vocab_size, id_C)
    x_C = masked(x_C, tl.load(mask_row_S + slot).to(tl.int64), mask_PW, num_words, vocab_size, id_C)
    if tl.load(num_new_S + slot) < tl.load(min_tokens_S + slot):
        for index in range(num_stops):
            x_C = tl.where(id_C == tl.load(stop_SX + slot * num_stops + index), float("-inf"), x_C)
    tl.store(work_BV + row * vocab_size + id_C, x_C, mask=valid_C)
    store_mass(best_BN + at, mass_BN + at, x_C, 1.0 / divisor_of(tl.load(temperature_S + slot)))


@triton.jit
def best_of(best_BN: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, NP: tl.constexpr) -> tl.tensor:
    """Return the largest of a row's chunk maxima."""
    chunk_N = tl.arange(0, NP)
    return tl.max(tl.load(best_BN + row * num_chunks + chunk_N, mask=chunk_N < num_chunks, other=float("-inf")), 0)


@triton.jit
def scaled(x_C: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return logits divided by the temperature, bit-equal to `sampling.scaled`, without negative zeros."""
    is_scaled = (temperature != 0.0) & (temperature != 1.0)
    shift = tl.where(is_scaled & (tl.abs(best) < float("inf")), best, 0.0)
    divisor = tl.where(is_scaled, tl.maximum(temperature, 1e-30), 1.0)
    y_C = tl.div_rn(x_C - shift, tl.broadcast_to(divisor, x_C.shape))
    return tl.where(y_C == 0.0, 0.0, y_C)


@triton.jit
def key_of(x_C: tl.tensor) -> tl.tensor:
    """Return uint32 keys in the order of the float32 values."""
    bits_C = x_C.to(tl.uint32, bitcast=True)
    return tl.where((bits_C >> 31) != 0, bits_C ^ 0xFFFFFFFF, bits_C | 0x80000000)


@triton.jit
def is_kept(
    x_C: tl.tensor, id_C: tl.tensor, best: tl.tensor, temperature: tl.tensor, key: tl.tensor, last: tl.tensor
) -> tl.tensor:
    """Return True for tokens above a row's cut: a key, and the last id kept among tokens with that key."""
    key_C = key_of(scaled(x_C, best, temperature)).to(tl.int64)
    return (key_C > key) | ((key_C == key) & (id_C <= last))


@triton.jit
def weights(x_C: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return e^((x - best) / T) in float64; temperature 0 counts as 1."""
    return tl.exp((x_C.to(tl.float64) - best.to(tl.float64)) / divisor_of(temperature))


@triton.jit
def sum_chunk(
    work_BV: tl.tensor,
    best_BN: tl.tensor,
    kept_BN: tl.tensor,
    cut_key_B: tl.tensor,
    cut_id_B: tl.tensor,
    slot_B: tl.tensor,
    temperature_S: tl.tensor,
    vocab_size: tl.tensor,
    C: tl.constexpr,
    NP: tl.constexpr,
) -> None:
    """Write the mass of one chunk's tokens that truncation keeps, relative to the row's best logit. Grid: (B, N)."""
    begin_kernel()
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperature_S + tl.load(slot_B + row))
    best = best_of(best_BN, row, num_chunks, NP)
    id_C = chunk * C + tl.arange(0, C)
    valid_C = id_C < vocab_size
    x_C = tl.load(work_BV + row * vocab_size + id_C, mask=valid_C, other=float("-inf"))
    kept_C = is_kept(x_C, id_C, best, temperature, tl.load(cut_key_B + row), tl.load(cut_id_B + row))
    weight_C = tl.where(valid_C & kept_C, weights(x_C, best, temperature), 0.0)
    tl.store(kept_BN + row * num_chunks + chunk, tl.sum(weight_C, 0))


@triton.jit
def uniform_of(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return `sampling.uniform`, float64, of int64 arguments."""
    state = mix64(seed.to(tl.uint64, bitcast=True))
    state = mix64(state ^ sample.to(tl.uint64, bitcast=True))
    state = mix64(state ^ position.to(tl.uint64, bitcast=True))
    return (state >> 11).to(tl.float64) / 9007199254740992.0


@triton.jit
def first_above(mass_C: tl.tensor, target: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return the first index whose cumulative mass exceeds the target; if none does, the last one with a mass."""
    index_C = tl.arange(0, C)
    above = tl.sum((tl.cumsum(mass_C, 0) <= target).to(tl.int32), 0)
    last = tl.max(tl.where(mass_C > 0, index_C, 0), 0)
    return tl.minimum(above, last)


@triton.jit
def token_of(
    work_V: tl.tensor,
    best_N: tl.tensor,
    kept_N: tl.tensor,
    uniform: tl.tensor,
    temperature: tl.tensor,
    cut_key: tl.tensor,
    cut_id: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    C: tl.constexpr,
    NP: tl.constexpr,
    HAS_CUT: tl.constexpr,
) -> tl.tensor:
    """Return the token at the uniform, or at temperature 0 the lowest id with the largest logit."""
    chunk_N, index_C = tl.arange(0, NP), tl.arange(0, C)
    best, target = tl.max(best_N, 0), uniform * tl.sum(kept_N, 0)
    greedy_chunk = tl.min(tl.where(best_N == best, chunk_N, NP), 0)
    chunk = tl.where(temperature == 0.0, greedy_chunk, first_above(kept_N, target, NP))
    chunk = tl.minimum(chunk, num_chunks - 1)
    before = tl.sum(tl.where(chunk_N < chunk, kept_N, 0.0), 0)
    id_C = chunk * C + index_C
    valid_C = id_C < vocab_size
    x_C = tl.load(work_V + id_C, mask=valid_C, other=float("-inf"))
    weight_C = tl.where(valid_C, weights(x_C, best, temperature), 0.0)
    if HAS_CUT:
        weight_C = tl.where(is_kept(x_C, id_C, best, temperature, cut_key, cut_id), weight_C, 0.0)
    greedy_index = tl.min(tl.where(x_C == best, index_C, C), 0)
    index = tl.where(temperature == 0.0, greedy_index, first_above(weight_C, target - before, C))
    return tl.minimum(chunk * C + index, vocab_size - 1)


@triton.jit
def kept_masses(kept_N: tl.tensor, valid_N: tl.tensor, mass_N: tl.tensor, is_cut: tl.tensor) -> tl.tensor:
    """Return the masses at pointers if the row truncates, else those of all tokens.

    Without the choice a row's bits would depend on whether another row of its step truncates.
    """
    return tl.where(is_cut, tl.load(kept_N, mask=valid_N, other=0.0), mass_N)


@triton.jit
def store_normaliser(normaliser_5: tl.tensor, best_N: tl.tensor, mass_N: tl.tensor, kept_N: tl.tensor) -> tl.tensor:
    """Write and return the best logit, the log of the mass of all tokens and of those kept, float64."""
    best, log_mass, log_kept = tl.max(best_N, 0).to(tl.float64), tl.log(tl.sum(mass_N, 0)), tl.log(tl.sum(kept_N, 0))
    tl.store(normaliser_5, best)
    tl.store(normaliser_5 + 1, log_mass)
    tl.store(normaliser_5 + 2, log_kept)
    return best, log_mass, log_kept


@triton.jit
def store_raw_normaliser(
    normaliser_5: tl.tensor, raw_best_BN: tl.tensor, raw_mass_BN: tl.tensor, at_N: tl.tensor, valid_N: tl.tensor
) -> tl.tensor:
    """Write and return the largest unmodified logit and the log of the mass relative to it, float64."""
    best_N = tl.load(raw_best_BN + at_N, mask=valid_N, other=float("-inf"))
    best = tl.max(best_N, 0)
    shift_N = tl.where(best_N == float("-inf"), best_N, best_N - best).to(tl.float64)
    mass_N = tl.load(raw_mass_BN + at_N, mask=valid_N, other=0.0) * tl.exp(shift_N)
    log_mass = tl.log(tl.sum(mass_N, 0))
    tl.store(normaliser_5 + 3, best.to(tl.float64))
    tl.store(normaliser_5 + 4, log_mass)
    return best.to(tl.float64), log_mass


@triton.jit
def raw_logprob_of(
    logit: tl.tensor, best: tl.tensor, log_mass: tl.tensor, cap: tl.tensor, HAS_CAP: tl.constexpr
) -> tl.tensor:
    """Return the log-probability, float32, of the token at a pointer to its unmodified logit; -9999 instead of -inf."""
    raw = tl.load(logit).to(tl.float32)
    if HAS_CAP:
        raw = capped(raw, cap)
    logprob = ((raw.to(tl.float64) - best) - log_mass).to(tl.float32)
    return tl.where(logprob == float("-inf"), -9999.0, logprob)


@triton.jit
def draw_row(
    logits_BV: tl.tensor,
    work_BV: tl.tensor,
    best_BN: tl.tensor,
    raw_best_BN: tl.tensor,
    raw_mass_BN: tl.tensor,
    mass_BN: tl.tensor,
    kept_BN: tl.tensor,
    cut_key_B: tl.tensor,
    cut_id_B: tl.tensor,
    slot_B: tl.tensor,
    temperature_S: tl.tensor,
    report_S: tl.tensor,
    seed_S: tl.tensor,
    sample_S: tl.tensor,
    position_S: tl.tensor,
    token_B: tl.tensor,
    logprob_B: tl.tensor,
    raw_logprob_B: tl.tensor,
    normaliser_B5: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    cap: tl.tensor,
    C: tl.constexpr,
    NP: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_CUT: tl.constexpr,
) -> None:
    """Write one row's token, its log-probabilities and the normalisers of its distributions. Grid: (B,)."""
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_B + row).to(tl.int64)
    temperature, report = tl.load(temperature_S + slot), tl.load(report_S + slot)
    chunk_N = tl.arange(0, NP)
    at_N, valid_N = row * num_chunks + chunk_N, chunk_N < num_chunks
    best_N = tl.load(best_BN + at_N, mask=valid_N, other=float("-inf"))
    mass_N = tl.load(mass_BN + at_N, mask=valid_N, other=0.0) * weights(best_N, tl.max(best_N, 0), temperature)
    cut_key, cut_id = tl.load(cut_key_B + row), tl.load(cut_id_B + row)
    kept_N = mass_N
    if HAS_CUT:
        kept_N = kept_masses(kept_BN + at_N, valid_N, mass_N, (cut_key > 0) | (cut_id < vocab_size))
    position = tl.load(position_S + slot).to(tl.int64) + 1
    uniform = uniform_of(tl.load(seed_S + slot), tl.load(sample_S + slot).to(tl.int64), position)
    work_V, normaliser_5 = work_BV + row * vocab_size, normaliser_B5 + row * 5
    token = token_of(
        work_V, best_N, kept_N, uniform, temperature, cut_key, cut_id, vocab_size, num_chunks, C, NP, HAS_CUT,
    )  # fmt: skip
    tl.store(token_B + row, token)

    best, log_mass, log_kept = store_normaliser(normaliser_5, best_N, mass_N, kept_N)
    y = (tl.load(work_V + token).to(tl.float64) - best) / divisor_of(temperature)
    processed = (y - log_kept).to(tl.float32)
    logprob = tl.where(report % 4 == TEMPERED, (y - log_mass).to(tl.float32), processed)
    if (report == RAW) | (report >= WANTS_RAW):
        raw_best, log_raw = store_raw_normaliser(normaliser_5, raw_best_BN, raw_mass_BN, at_N, valid_N)
        raw_logprob = raw_logprob_of(logits_BV + row * stride + token, raw_best, log_raw, cap, HAS_CAP)
        tl.store(raw_logprob_B + row, raw_logprob)
        logprob = tl.where(report % 4 == RAW, raw_logprob, logprob)
    tl.store(logprob_B + row, tl.where(tl.abs(processed) < float("inf"), logprob, processed))
