"""Launchers of both ends of a decode step: `load` before the model; after it `adjust`, `cut` if a row truncates,
`draw`, `tops` if wanted, and `advance`.

`sampling.draw` is the reference. All arguments are tensors on the device, indexed by slot where the parameters of a
request are concerned; `slot_B` maps the rows of a step to distinct slots. Nothing is copied to the host.

Shapes: B rows, S slots, V vocabulary, N chunks of the vocabulary, P rows of a table, X stop tokens of a slot,
W = ceil(V / 32) words of a mask, K top tokens or entries of a ring.
"""

from __future__ import annotations

from torch import Tensor

from nano_inference.executors.cuda.checks import check_logits
from nano_inference.executors.cuda.kernels import advance as advance_kernel
from nano_inference.executors.cuda.kernels import sampler, select
from nano_inference.executors.cuda.kernels.variant import Variant, padded
from nano_inference.executors.cuda.sample_records import CHUNK, Scratch, Slots, Tables


def adjust_variant(*, has_cap: bool) -> Variant:
    """Return the constants of `adjust`."""
    return Variant(constants={"C": CHUNK, "HAS_CAP": has_cap}, num_warps=4, fuses=False)


def sum_variant(vocab_size: int) -> Variant:
    """Return the constants of the masses that truncation keeps."""
    return Variant(constants={"C": CHUNK, "NP": padded_chunks(vocab_size)}, num_warps=4, fuses=False)


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
    """Write logits after soft cap, penalties, bias, masks and bans (`sampling.adjust_logits`), and masses of chunks.

    `logits_BV` is the model's output in any precision, unchanged; rows may be longer than the vocabulary.
    """
    check_logits(out, logits_BV)
    vocab_size = out.work.size(1)
    adjust_variant(has_cap=softcap is not None).launch(
        sampler.adjust_chunk,
        (slot_B.size(0), out.best.size(1)),
        logits_BV,
        *(out.work, out.best, out.mass, out.raw_best, out.raw_mass, slot_B),
        *(slots.temperature, slots.report, slots.repetition, slots.presence, slots.frequency),
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
    if has_cut:
        sum_variant(vocab_size).launch(
            sampler.sum_chunk,
            (slot_B.size(0), out.best.size(1)),
            *(out.work, out.best, out.kept, out.cut_key, out.cut_id, slot_B, slots.temperature, vocab_size),
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
