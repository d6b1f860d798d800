"""Launchers of both ends of a decode step: `load` before the model; after it `adjust`, `cut` if a row truncates,
`draw`, `tops` if wanted, and `advance`.

`sampling.draw` is the reference. All arguments are tensors on the device, indexed by slot where the parameters of a
request are concerned; `slot_B` maps the rows of a step to distinct slots. Nothing is copied to the host.

Shapes: B rows, S slots, V vocabulary, N chunks of the vocabulary, P rows of a table, X stop tokens of a slot,
W = ceil(V / 32) words of a mask, K top tokens or entries of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.executors.cuda.kernels import advance as advance_kernel
from nano_inference.executors.cuda.kernels import sampler, select
from nano_inference.executors.cuda.kernels.variant import Variant, check_dtype, check_rows, padded

CHUNK = 1024
"""Tokens of the vocabulary per program."""
MOST_TOKENS = 1 << 19
"""Largest supported vocabulary."""
REPORTS = {"raw": 0, "tempered": 1, "processed": 2}
WANTS_RAW = 4
RUNNING, STOPPED, FULL = 0, 1, 2
"""Values of `Slots.state`: stopped by a token, or by the number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Sampling parameters and state of each slot, all contiguous. int32 unless stated otherwise."""

    temperature: Tensor
    """float32 [S]; 0 is greedy."""
    top_k: Tensor
    """0: off."""
    top_p: Tensor
    """float64; 1: off."""
    min_p: Tensor
    """float64; 0: off."""
    report: Tensor
    """`REPORTS` of the log-probability mode, plus `WANTS_RAW` if the raw one is wanted too."""
    repetition: Tensor
    """float32, as are the next two: `SamplingParams.repetition_penalty`, and so on."""
    presence: Tensor
    frequency: Tensor
    count_row: Tensor
    """Row of `Tables.count`; -1: no penalties. No two slots may share one."""
    bias_row: Tensor
    """Row of `Tables.bias`; -1: none."""
    mask_row: Tensor
    """Row of `Tables.mask`; -1: none."""
    seed: Tensor
    """int64: the bits of the unsigned seed."""
    sample: Tensor
    """Index of the sample in its request."""
    num_tops: Tensor
    stop: Tensor
    """[S, X]: tokens that end the sample, then -1."""
    min_tokens: Tensor
    """Stop tokens are banned before so many tokens."""
    max_tokens: Tensor
    token: Tensor
    """The token that the step computes."""
    previous: Tensor
    """The token before it."""
    position: Tensor
    """Its position; the drawn token's is one more."""
    num_new: Tensor
    """Tokens drawn so far."""
    state: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of the vocabulary's size for requests that need them."""

    count: Tensor
    """int32 [P, V]: twice the occurrences in the output, plus one if the prompt has the token."""
    bias: Tensor
    """float32 [P, V]: added to the logits; -inf excludes a token (ids that are not allowed)."""
    mask: Tensor
    """int32 [P, W]: bit i % 32 of word i // 32 is 1 if token i is allowed (`Matcher.mask`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Buffers of one step, and its results. Contents need no initialisation."""

    work: Tensor
    """Adjusted logits, float32 [B, V]."""
    best: Tensor
    """float32 [B, N], as `raw_best`."""
    raw_best: Tensor
    raw_mass: Tensor
    """float64 [B, N], as `mass` and `kept`."""
    mass: Tensor
    kept: Tensor
    cut_key: Tensor
    """int64 [B]: see `select.cut_row`."""
    cut_id: Tensor
    normaliser: Tensor
    """float64 [B, 5]: see `sampler.draw_row`."""
    token: Tensor
    """int32 [B]: the drawn tokens."""
    logprob: Tensor
    """float32 [B]: their log-probabilities in the slot's mode; NaN if no token can be drawn."""
    raw_logprob: Tensor
    """float32 [B]: under the unmodified logits, where the slot wants it or its mode is raw."""
    top_id: Tensor
    """int32 [B, K]: the most probable tokens in descending order, then -1."""
    top_logprob: Tensor


def new_scratch(num_rows: int, vocab_size: int, num_tops: int, device: torch.device) -> Scratch:
    """Allocate the buffers for steps of `num_rows` rows. Raises `ValueError` if the vocabulary is too large."""
    if vocab_size > MOST_TOKENS:
        raise ValueError(f"the sampler supports vocabularies of {MOST_TOKENS} tokens, got {vocab_size}")
    shape = (num_rows, -(-vocab_size // CHUNK))

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Scratch(
        work=new((num_rows, vocab_size), torch.float32),
        best=new(shape, torch.float32),
        raw_best=new(shape, torch.float32),
        raw_mass=new(shape, torch.float64),
        mass=new(shape, torch.float64),
        kept=new(shape, torch.float64),
        cut_key=new((num_rows,), torch.int64),
        cut_id=new((num_rows,), torch.int32),
        normaliser=new((num_rows, 5), torch.float64),
        token=new((num_rows,), torch.int32),
        logprob=new((num_rows,), torch.float32),
        raw_logprob=new((num_rows,), torch.float32),
        top_id=new((num_rows, num_tops), torch.int32),
        top_logprob=new((num_rows, num_tops), torch.float32),
    )


def adjust_variant(*, has_cap: bool) -> Variant:
    """Return the constants of `adjust`."""
    return Variant(constants={"C": CHUNK, "HAS_CAP": has_cap}, num_warps=4, fuses=False)


def sum_variant(vocab_size: int, *, has_cut: bool) -> Variant:
    """Return the constants of the masses of chunks."""
    constants = {"C": CHUNK, "NP": padded_chunks(vocab_size), "HAS_CUT": has_cut}
    return Variant(constants=constants, num_warps=4, fuses=False)


def draw_variant(vocab_size: int, *, has_cap: bool, has_cut: bool) -> Variant:
    """Return the constants of `draw`."""
    constants = {"C": CHUNK, "NP": padded_chunks(vocab_size), "HAS_CAP": has_cap, "HAS_CUT": has_cut}
    return Variant(constants=constants, num_warps=4, fuses=False)


def cut_variant(vocab_size: int) -> Variant:
    """Return the constants of `cut`."""
    return Variant(constants={"C": CHUNK, "NP": padded_chunks(vocab_size)}, num_warps=8, fuses=False)


def tops_variant(*, has_cap: bool, has_cut: bool) -> Variant:
    """Return the constants of `tops`."""
    return Variant(constants={"C": 4 * CHUNK, "HAS_CAP": has_cap, "HAS_CUT": has_cut}, num_warps=8, fuses=False)


def advance_variant() -> Variant:
    """Return the constants of `load` and `advance`."""
    return Variant(constants={"C": 128}, num_warps=4, fuses=False)


def padded_chunks(vocab_size: int) -> int:
    """Return the number of chunks of a vocabulary, as a power of two."""
    return padded(-(-vocab_size // CHUNK))


def load(
    slot_B: Tensor, slots: Slots, token_B: Tensor, previous_B: Tensor, position_B: Tensor, length_B: Tensor
) -> None:
    """Write the inputs of a decode step, int32: each row's token, the one before it, its position, its number of keys.

    A slot that is not running gets position -1 and length 0: it writes no K/V and attends to nothing.
    """
    variant = advance_variant()
    variant.launch(
        advance_kernel.load_rows,
        (-(-slot_B.size(0) // variant.constants["C"]),),
        *(slot_B, slots.token, slots.previous, slots.position, slots.state),
        *(token_B, previous_B, position_B, length_B, slot_B.size(0)),
    )


def adjust(
    out: Scratch, logits_BV: Tensor, slot_B: Tensor, slots: Slots, tables: Tables, softcap: float | None = None
) -> None:
    """Write the logits after soft cap, penalties, bias, masks and bans (`sampling.adjust_logits`).

    `logits_BV` is the model's output in any precision, unchanged; rows may be longer than the vocabulary.
    """
    check_dtype("logits", logits_BV)
    check_rows(logits=logits_BV)
    vocab_size = out.work.size(1)
    if logits_BV.size(1) < vocab_size or logits_BV.size(0) > out.work.size(0):
        raise ValueError(f"logits {tuple(logits_BV.shape)} do not fit the buffers {tuple(out.work.shape)}")
    adjust_variant(has_cap=softcap is not None).launch(
        sampler.adjust_chunk,
        (slot_B.size(0), out.best.size(1)),
        logits_BV,
        *(out.work, out.best, out.raw_best, out.raw_mass, slot_B),
        *(slots.report, slots.repetition, slots.presence, slots.frequency),
        *(slots.count_row, slots.bias_row, slots.mask_row, slots.min_tokens, slots.num_new, slots.stop),
        *(tables.count, tables.bias, tables.mask),
        *(logits_BV.stride(0), vocab_size, slots.stop.size(1), tables.mask.size(1), softcap or 1.0),
    )


def cut(out: Scratch, slot_B: Tensor, slots: Slots) -> None:
    """Find which tokens top-k, top-p and min-p keep in each row (`sampling.truncate`); call after `adjust`."""
    vocab_size = out.work.size(1)
    cut_variant(vocab_size).launch(
        select.cut_row,
        (slot_B.size(0),),
        *(out.work, out.best, out.cut_key, out.cut_id, slot_B),
        *(slots.temperature, slots.top_k, slots.top_p, slots.min_p),
        *(vocab_size, out.best.size(1)),
    )


def draw(
    out: Scratch, logits_BV: Tensor, slot_B: Tensor, slots: Slots, *, has_cut: bool, softcap: float | None = None
) -> None:
    """Draw each row's token at its uniform and compute its log-probabilities; call after `adjust`.

    `has_cut`: `cut` was called for this step. The other arguments are those of `adjust`.
    """
    vocab_size = out.work.size(1)
    sum_variant(vocab_size, has_cut=has_cut).launch(
        sampler.sum_chunk,
        (slot_B.size(0), out.best.size(1)),
        *(out.work, out.best, out.mass, out.kept, out.cut_key, out.cut_id, slot_B, slots.temperature, vocab_size),
    )
    draw_variant(vocab_size, has_cap=softcap is not None, has_cut=has_cut).launch(
        sampler.draw_row,
        (slot_B.size(0),),
        *(logits_BV, out.work, out.best, out.raw_best, out.raw_mass, out.mass, out.kept, out.cut_key, out.cut_id),
        *(slot_B, slots.temperature, slots.report, slots.seed, slots.sample, slots.position),
        *(out.token, out.logprob, out.raw_logprob, out.normaliser),
        *(logits_BV.stride(0), vocab_size, out.best.size(1), softcap or 1.0),
    )


def tops(
    out: Scratch, logits_BV: Tensor, slot_B: Tensor, slots: Slots, *, has_cut: bool, softcap: float | None = None
) -> None:
    """Write each row's `Slots.num_tops` most probable tokens in its mode; call after `draw` with its arguments."""
    tops_variant(has_cap=softcap is not None, has_cut=has_cut).launch(
        select.top_row,
        (slot_B.size(0),),
        *(logits_BV, out.work, out.normaliser, out.cut_key, out.cut_id, slot_B),
        *(slots.temperature, slots.report, slots.num_tops, out.top_id, out.top_logprob),
        *(logits_BV.stride(0), out.work.size(1), out.top_id.size(1), softcap or 1.0),
    )


def advance(
    drawn: Scratch, slot_B: Tensor, slots: Slots, tables: Tables, ring_token_SK: Tensor, ring_logprob_SK: Tensor
) -> None:
    """Append the drawn tokens of running slots to their rings, at entry `num_new` % K, and update the slots.

    Sets `state` after a stop token, or after `max_tokens` tokens; slots that are not running do not change.
    """
    variant = advance_variant()
    variant.launch(
        advance_kernel.advance_rows,
        (-(-slot_B.size(0) // variant.constants["C"]),),
        *(drawn.token, drawn.logprob, slot_B),
        *(slots.token, slots.previous, slots.position, slots.num_new, slots.max_tokens, slots.state, slots.stop),
        *(slots.count_row, tables.count, ring_token_SK, ring_logprob_SK),
        *(slot_B.size(0), slots.stop.size(1), drawn.work.size(1), ring_token_SK.size(1)),
    )
